"""Which unit tests make test leaves out, and the file that names them."""

from pathlib import Path

from tests.support.durations import LONG_S, LONG_TESTS, Tier, long_tests

ROOT = Path(__file__).parents[3]


def test_long_tests_are_unit_tests_over_the_limit():
    tests = {
        "tests/unit/b.py::test_long": LONG_S + 0.1,
        "tests/unit/a.py::test_long": 9.0,
        "tests/unit/a.py::test_short": LONG_S,
        "tests/e2e/c.py::test_long": 9.0,
    }
    lines = long_tests(Tier(tests, wall_s=20.0)).splitlines()
    assert lines == ["tests/unit/a.py::test_long", "tests/unit/b.py::test_long"]


def test_the_files_of_the_long_tests_are_there():
    """A test that moved is fast again without anybody's noticing."""
    files = {
        line.partition("::")[0] for line in (ROOT / LONG_TESTS).read_text("utf-8").splitlines()
    }
    assert [file for file in sorted(files) if not (ROOT / file).is_file()] == []
