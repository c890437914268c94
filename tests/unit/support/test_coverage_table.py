"""The coverage of packages is summed over their files, and compared with the floors."""

from tests.support.coverage_table import (
    floors_of,
    packages_below,
    percents,
    sums_by_package,
    table_of,
)


def file(lines: int, of_lines: int, branches: int, of_branches: int) -> dict[str, dict[str, int]]:
    return {
        "summary": {
            "covered_lines": lines,
            "num_statements": of_lines,
            "covered_branches": branches,
            "num_branches": of_branches,
        }
    }


def test_files_of_a_package_count_together_and_subpackages_with_them():
    report = {
        "files": {
            "app/queueing/admission.py": file(90, 100, 1, 3),
            "app/queueing/scheduler.py": file(0, 100, 1, 3),
            "app/launch/fork_client.py": file(2, 3, 0, 0),
            "app/settings.py": file(7, 7, 2, 2),
        }
    }
    sums = sums_by_package(report)
    measured = {package: percents(counts) for package, counts in sums.items()}
    assert measured == {"app": [100, 100], "app/launch": [66, 100], "app/queueing": [45, 33]}


def test_a_floor_is_two_points_or_one_line_below_what_was_measured():
    report = {
        "files": {
            "app/queueing/scheduler.py": file(900, 1000, 10, 20),
            "models/bare.py": file(0, 4, 0, 0),
        }
    }
    sums = sums_by_package(report)
    floors = floors_of(sums)
    assert floors == {"app/queueing": [88, 45], "models": [0, 98]}
    measured = {package: percents(counts) for package, counts in sums.items()}
    assert packages_below(measured, floors) == []
    assert table_of(measured, floors).splitlines()[2:] == [
        "| `app/queueing` | 90 | 50 | 88 and 45 |",
        "| `models` | 0 | 100 | 0 and 98 |",
    ]


def test_a_package_below_a_floor_is_named_with_both_figures():
    floors = {"app/queueing": [45, 34], "app/gone": [1, 0], "app": [100, 100]}
    measured = {"app/queueing": [45, 33], "app": [100, 100]}
    assert packages_below(measured, floors) == [
        "app/queueing has 33, its floor is 34",
        "app/gone has 0, its floor is 1",
    ]
