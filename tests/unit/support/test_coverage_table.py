"""The coverage of packages is summed over their files, and compared with the floors."""

from tests.support.coverage_table import (
    floors_of,
    packages_below,
    percents,
    sums_by_package,
    table_of,
)


def report_of(**counts: tuple[int, int, int, int]) -> dict:
    """Return coverage's report of files: lines and branches, each covered and of how many."""
    names = ("covered_lines", "num_statements", "covered_branches", "num_branches")
    return {
        "files": {
            f"app/{path}.py": {"summary": dict(zip(names, numbers, strict=True))}
            for path, numbers in counts.items()
        }
    }


def test_files_of_a_package_count_together():
    files = {
        "queueing/admission": (90, 100, 1, 3),
        "queueing/scheduler": (0, 100, 1, 3),
        "launch/fork_client": (2, 3, 0, 0),
        "settings": (7, 7, 2, 2),
    }
    sums = sums_by_package(report_of(**files))
    measured = {package: percents(counts) for package, counts in sums.items()}
    assert measured == {"app": [100, 100], "app/launch": [66, 100], "app/queueing": [45, 33]}


def test_a_package_below_a_floor_is_named_with_both_figures():
    """A floor is two points, or one line, below what was measured."""
    sums = sums_by_package(
        report_of(**{"queueing/scheduler": (900, 1000, 10, 20), "bare": (0, 4, 0, 0)})
    )
    floors = floors_of(sums)
    assert floors == {"app/queueing": [88, 45], "app": [0, 98]}
    measured = {package: percents(counts) for package, counts in sums.items()}
    assert packages_below(measured, floors) == []
    row = "| `app/queueing` | 90 | 50 | 88 and 45 |"
    assert row in table_of(measured, floors).splitlines()
    below = packages_below(
        {"app": [0, 97], "app/queueing": [88, 44]}, floors | {"app/gone": [1, 0]}
    )
    assert below == [
        "app has 97, its floor is 98",
        "app/queueing has 44, its floor is 45",
        "app/gone has 0, its floor is 1",
    ]
