"""How long a target took, which unit tests make test leaves out, and the file that names them."""

from pathlib import Path

from tests.support.durations import LONG_TESTS

ROOT = Path(__file__).parents[3]


def test_the_files_of_the_long_tests_are_there():
    """A test that moved is fast again without anybody's noticing."""
    lines = (ROOT / LONG_TESTS).read_text("utf-8").splitlines()
    files = sorted({line.partition("::")[0] for line in lines})
    assert [file for file in files if not (ROOT / file).is_file()] == []
