"""Prints line and branch coverage by package, and fails below the floors: make coverage.

The floors are in tests/coverage.json, in percent. ``--set-floors`` writes them anew, a little below
what was measured, and the table to tests/coverage.md: run it after ``make coverage``.
"""

import argparse
import json
import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from models.machine import describe_machine

ROOT = Path(__file__).parents[2]
REPORT = ROOT / "build" / "coverage" / "report.json"
FLOORS = ROOT / "tests" / "coverage.json"
PAGE = ROOT / "tests" / "coverage.md"
KINDS = (("covered_lines", "num_statements"), ("covered_branches", "num_branches"))
SLACK = 2  # points: threads and timeouts take other branches from run to run
TEXT = """# Coverage of the unit tests

Lines and branches that the fast unit tests run, by package. `make coverage` measures them, and
fails if a package is below its floor in `tests/coverage.json`. A floor is two points, or one line,
below what was measured. What runs in a process of its own, such as a replica, does not count.

<!-- What follows is written by: python -m tests.support.coverage_table --set-floors -->

"""


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--set-floors", action="store_true")
    sums = sums_by_package(json.loads(REPORT.read_text("utf-8")))
    is_setting = arguments.parse_args().set_floors
    if is_setting:
        FLOORS.write_text(json.dumps(floors_of(sums), indent=1) + "\n", "utf-8")
    floors = json.loads(FLOORS.read_text("utf-8"))
    measured = {package: percents(counts) for package, counts in sums.items()}
    table = table_of(measured, floors)
    if is_setting:
        machine = describe_machine()
        when = f"Measured on {machine['measured'][:10]}, Python {machine['python']}:\n\n"
        PAGE.write_text(TEXT + when + table, "utf-8")
    print(table, end="")
    if below := packages_below(measured, floors):
        sys.exit("coverage fell: " + "; ".join(below) + ". Test what is new, or lower the floor")


def sums_by_package(report: dict[str, Any]) -> dict[str, Counter[str]]:
    """Return how many lines and branches each package has, and how many of them were run."""
    sums: dict[str, Counter[str]] = {}
    for name, file in report["files"].items():
        summary = {key: file["summary"].get(key, 0) for kind in KINDS for key in kind}
        sums.setdefault(package_of(name), Counter()).update(summary)
    return dict(sorted(sums.items()))


def percents(counts: Counter[str], fewer: int = 0) -> list[int]:
    """Return the percentages of lines and branches, rounded down, had ``fewer`` been run."""
    return [_percent(counts[covered] - fewer, counts[num]) for covered, num in KINDS]


def floors_of(sums: dict[str, Counter[str]]) -> dict[str, list[int]]:
    """Return floors that a run of the same tests does not miss by chance."""
    return {
        package: [
            max(0, min(measured - SLACK, one_fewer))
            for measured, one_fewer in zip(percents(counts), percents(counts, 1), strict=True)
        ]
        for package, counts in sums.items()
    }


def table_of(measured: dict[str, list[int]], floors: dict[str, list[int]]) -> str:
    lines = ["| package | lines, % | branches, % | floors |", "| --- | --- | --- | --- |"]
    for package, (of_lines, of_branches) in measured.items():
        floor = " and ".join(map(str, floors.get(package, [])))
        lines.append(f"| `{package}` | {of_lines} | {of_branches} | {floor} |")
    return "\n".join(lines) + "\n"


def package_of(name: str) -> str:
    """Return the package that a file counts for: app/queueing, or app for its own modules."""
    return "/".join(Path(name).parts[:-1][:2])


def packages_below(measured: dict[str, list[int]], floors: dict[str, list[int]]) -> list[str]:
    """Return what is below its floor, in words; a package that is gone is below it too."""
    return [
        f"{package} has {have}, its floor is {want}"
        for package, floor in floors.items()
        for have, want in zip(measured.get(package, [0, 0]), floor, strict=True)
        if have < want
    ]


def _percent(part: int, whole: int) -> int:
    return math.floor(100 * part / whole) if whole else 100


if __name__ == "__main__":
    main()
