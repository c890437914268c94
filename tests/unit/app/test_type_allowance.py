"""make check types the tests too; the list of those with errors only gets shorter."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]
MYPY = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["mypy"]
EXEMPT = {
    module
    for part in MYPY["overrides"]
    if part.get("ignore_errors")
    for module in part["module"]
    if module.startswith("tests.")
}
MAX_EXEMPT = 155  # of some 560 test modules; lower it with each one that is mended


def test_the_tests_are_typed() -> None:
    assert "tests" in MYPY["files"]
    assert MYPY["strict"] is True


def test_few_test_modules_are_exempt_and_they_are_there() -> None:
    assert len(EXEMPT) <= MAX_EXEMPT
    assert [name for name in EXEMPT if not (ROOT / f"{name.replace('.', '/')}.py").exists()] == []
