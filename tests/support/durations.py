"""Which tests take how long, from the JUnit files that ``make test`` and ``make test-all`` leave.

A test's time includes the fixtures that it was the first to need and the last to have.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from xml.etree import ElementTree

from models.machine import available_cpus, cpu_model
from tests.support.wrapped import wrapped

RESULTS = Path("build/tests")  # where the Makefile has them written
REPORT = Path("tests/durations.md")
MARK = "<!-- What follows is written by make durations. -->\n"
NUM_PRINTED, NUM_KEPT = 15, 40
# The unit tests that make test leaves out, an id a line: all that took longer than this.
LONG_TESTS, LONG_S = Path("tests/long_tests.txt"), 0.3


@dataclass(frozen=True)
class Tier:
    """The tests that one target ran, with the seconds of each, and of all from start to end."""

    tests: dict[str, float]
    wall_s: float

    def slowest(self, num: int) -> list[tuple[str, float]]:
        return sorted(self.tests.items(), key=lambda test: -test[1])[:num]

    def without(self, other: "Tier") -> "Tier":
        rest = {name: s for name, s in self.tests.items() if name not in other.tests}
        return Tier(rest, self.wall_s - other.wall_s)


def read(files: Iterable[Path]) -> Tier:
    """Read the runs of a target: it has several, of which some run at a time."""
    suites = [suite for path in files for suite in ElementTree.parse(path).iter("testsuite")]
    tests = {
        f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}": float(
            case.attrib["time"]
        )
        for suite in suites
        for case in suite.iter("testcase")
        if "classname" in case.attrib  # not so where a run was interrupted
    }
    starts = [datetime.fromisoformat(suite.attrib["timestamp"]) for suite in suites]
    lengths = [timedelta(seconds=float(suite.attrib["time"])) for suite in suites]
    last = max(start + length for start, length in zip(starts, lengths, strict=True))
    return Tier(tests, (last - min(starts)).total_seconds())


def of_target(target: str) -> Tier:
    return read(RESULTS.glob(f"{target}-of-*.xml"))


def table(tier: Tier) -> str:
    rows = [f"| {seconds:.1f} | `{name}` |" for name, seconds in tier.slowest(NUM_KEPT)]
    return "\n".join(["| s | test |", "| --- | --- |", *rows]) + "\n"


def report(fast: Tier, everything: Tier, other_ray: Tier) -> str:
    only_slow = everything.without(fast)
    return wrapped(
        f"\nMeasured on {datetime.now(UTC):%Y-%m-%d}, {available_cpus()} cores, {cpu_model()}:\n\n"
        "| target | tests | seconds |\n| --- | --- | --- |\n"
        f"| `make test` | {len(fast.tests)} | {fast.wall_s:.0f} |\n"
        f"| `make test-all` | {len(everything.tests)} | {everything.wall_s:.0f} |\n"
        f"| then, in it, with another Ray | {len(other_ray.tests)} | {other_ray.wall_s:.0f} |\n\n"
        f"## The slowest of `make test`\n\n{table(fast)}\n"
        f"## The slowest of what only `make test-all` runs\n\n{table(only_slow)}"
    )


def long_tests(tier: Tier) -> str:
    ids = (name for name, s in tier.tests.items() if name.startswith("tests/unit/") and s > LONG_S)
    return "".join(f"{name}\n" for name in sorted(ids))


def main(arguments: list[str]) -> None:
    """Print a target's slowest tests, or without a target write what make durations writes."""
    if arguments:
        tier = of_target(arguments[0])
        print(f"\nthe slowest of {len(tier.tests)} tests, {tier.wall_s:.0f} s in all:")
        for name, seconds in tier.slowest(NUM_PRINTED):
            print(f"{seconds:7.1f} s  {name}")
        return
    above = REPORT.read_text("utf-8").partition(MARK)[0]
    everything = of_target("test-all")
    tiers = of_target("test"), everything, of_target("test-ray")
    REPORT.write_text(above + MARK + report(*tiers), "utf-8")
    LONG_TESTS.write_text(long_tests(everything), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
