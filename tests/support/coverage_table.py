"""Prints line and branch coverage by package, and fails below the floors: make coverage.

The floors are in tests/coverage.json, in percent: where coverage stood when it was last measured.
``--set-floors`` writes them anew.
"""

import argparse
import json
import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
REPORT = ROOT / "build" / "coverage" / "report.json"
FLOORS = ROOT / "tests" / "coverage.json"
COUNTED = ("covered_lines", "num_statements", "covered_branches", "num_branches")


def main() -> None:
    """Print the table; exit code 1 if a package is below its floor."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--set-floors", action="store_true")
    measured = by_package(json.loads(REPORT.read_text("utf-8")))
    if arguments.parse_args().set_floors:
        FLOORS.write_text(json.dumps(measured, indent=1) + "\n", "utf-8")
    floors = json.loads(FLOORS.read_text("utf-8"))
    print("| package | lines, % | branches, % | floors |\n| --- | --- | --- | --- |")
    for package, (lines, branches) in measured.items():
        floor = " and ".join(map(str, floors.get(package, [])))
        print(f"| `{package}` | {lines} | {branches} | {floor} |")
    if below := packages_below(measured, floors):
        sys.exit("coverage fell: " + "; ".join(below) + ". Test what is new, or lower the floor")


def by_package(report: dict[str, Any]) -> dict[str, list[int]]:
    """Return the percentages of lines and branches by package, rounded down."""
    sums: dict[str, Counter[str]] = {}
    for name, file in report["files"].items():
        package = package_of(name)
        summary = {key: file["summary"].get(key, 0) for key in COUNTED}
        sums.setdefault(package, Counter()).update(summary)
    return {
        package: [
            _percent(total["covered_lines"], total["num_statements"]),
            _percent(total["covered_branches"], total["num_branches"]),
        ]
        for package, total in sorted(sums.items())
    }


def package_of(name: str) -> str:
    """Return the package that a file counts for: app/queueing, or app for its own modules."""
    folders = Path(name).parts[:-1]
    return "/".join(folders[:2])


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
