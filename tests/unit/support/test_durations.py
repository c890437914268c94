"""How long a target took, which unit tests make test leaves out, and the file that names them."""

from pathlib import Path

from tests.support.durations import LONG_S, LONG_TESTS, Tier, long_tests, read

ROOT = Path(__file__).parents[3]


def test_runs_at_a_time_count_once(tmp_path: Path):
    runs = {"unit": ("04:00:00", 300.0), "integration": ("04:00:01", 200.0), "e2e": ("04:05:10", 9)}
    for name, (start, seconds) in runs.items():
        case = f'<testcase classname="tests.{name}.test_a" name="test_b" time="1.5"/>'
        (tmp_path / f"{name}.xml").write_text(
            f'<testsuites><testsuite time="{seconds}" timestamp="2026-11-27T{start}+00:00">'
            f"{case}</testsuite></testsuites>"
        )
    tier = read(tmp_path.iterdir())
    assert tier.wall_s == 319
    assert tier.tests["tests/e2e/test_a.py::test_b"] == 1.5
    assert len(tier.tests) == 3


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
