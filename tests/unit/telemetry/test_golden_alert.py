"""The golden check's alert over series as they really come, played by promtool."""

from pathlib import Path

import pytest

from app.telemetry.metric_table import FAILED_GOLDEN_CHECKS, GOLDEN_PASSED
from tests.support.exposed_metrics import exposed
from tests.support.played_rules import play, series

ALERT = "TandemGoldenFailed"


def of_member(name: str, replica: str, values: str, member: str = "resnet50") -> dict[str, str]:
    return series(name, {"member": member, "replica": replica, "deployment": "Gateway"}, values)


def failed(*members: str) -> list[dict[str, str]]:
    return [{"severity": "critical", "member": member} for member in members]


@pytest.mark.prometheus
def test_a_failed_golden_check_fires_for_ten_minutes(tmp_path: Path) -> None:
    """A replica's count is born at 1 and stays, in Ray's agent; its gauge ends with the replica.

    The gauge's 0 was told by nobody who was asked to end before the next flush: it is not given.
    """
    (counted,), (passed,) = exposed(FAILED_GOLDEN_CHECKS), exposed(GOLDEN_PASSED)
    given = [
        of_member(passed, "old", "1x240"),
        of_member(passed, "old", "1x240", member="densenet169"),
        of_member(counted, "first", "_x60 1x180"),  # after ten minutes
        of_member(counted, "second", "_x120 1x120"),  # Serve's next try, another ten minutes later
    ]
    expected = {
        "9m": [],
        "10m15s": failed("resnet50"),
        "19m": failed("resnet50"),
        "21m": failed("resnet50"),
        "29m": failed("resnet50"),
        "31m": [],
    }
    play(tmp_path, given, ALERT, expected)


@pytest.mark.prometheus
def test_a_failed_check_is_told_of_the_member_that_failed(tmp_path: Path) -> None:
    (counted,) = exposed(FAILED_GOLDEN_CHECKS)
    given = [
        of_member(counted, "a", "1x120"),
        of_member(counted, "b", "_x90 1x30", member="densenet169"),
    ]
    expected = {"5m": failed("resnet50"), "14m": [], "16m": failed("densenet169")}
    play(tmp_path, given, ALERT, expected)


@pytest.mark.prometheus
def test_without_failures_nothing_fires_nor_when_the_counts_end(tmp_path: Path) -> None:
    (counted,), (passed,) = exposed(FAILED_GOLDEN_CHECKS), exposed(GOLDEN_PASSED)
    given = [of_member(passed, "a", "1x120"), of_member(counted, "a", "1x90 _x30")]
    play(tmp_path, given, ALERT, {"12m": [], "20m": []})
