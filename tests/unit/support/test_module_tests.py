"""Every module has tests, and a command finds them: tests/support/module_tests.py."""

import pytest

from tests.support import module_tests
from tests.support.cases import cases
from tests.support.module_tests import ELSEWHERE, ROOT, main

MAX_ELSEWHERE = 6  # may only fall: name a new test file like its module


def test_every_module_has_tests_that_are_there() -> None:
    tests = {module: module_tests.tests_of(module) for module in module_tests.modules()}
    assert [module for module, files in tests.items() if not files] == []
    assert [f for files in tests.values() for f in files if not (ROOT / f).exists()] == []


def test_exceptions_are_few_and_of_modules_that_are_there() -> None:
    assert len(ELSEWHERE) <= MAX_ELSEWHERE
    assert ELSEWHERE.keys() <= set(module_tests.modules())


@cases(
    "module, first",
    ("app/queueing/admission.py", "tests/unit/queueing/test_admission.py"),
    ("models/image.py", "tests/unit/models/test_image.py"),
    ("client/tandem_client/images.py", "tests/unit/client/test_images.py"),
    ("app/graph/ensemble.py", "tests/unit/graph"),
)
def test_files_named_like_the_module_come_first(module: str, first: str, capsys) -> None:
    main([module])
    assert capsys.readouterr().out.splitlines()[0] == first


def test_a_module_without_tests_is_an_error() -> None:
    with pytest.raises(SystemExit, match=r"new\.py has no test: add tests/unit/queueing"):
        main(["app/queueing/new.py"])
    with pytest.raises(ValueError, match="name it from the project's root"):
        main(["admission.py"])
