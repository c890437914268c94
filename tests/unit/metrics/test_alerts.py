"""The alert rules over series as they really come, played by promtool."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.metrics.table import FAILED_GOLDEN_CHECKS, GOLDEN_PASSED
from tests.support.prometheus_programs import PROMTOOL

ALERTS = Path(__file__).parents[3] / "configs" / "prometheus" / "alerts.yaml"
SCRAPE_S = 10  # configs/prometheus/prometheus.yaml


def series(name: str, replica: str, values: str, member: str = "resnet50") -> dict[str, str]:
    return {
        "series": f'{name}{{member="{member}",replica="{replica}",deployment="Gateway"}}',
        "values": values,
    }


def golden_failed(member: str) -> dict[str, Any]:
    (rule,) = [
        rule
        for group in yaml.safe_load(ALERTS.read_text("utf-8"))["groups"]
        for rule in group["rules"]
        if rule.get("alert") == "TandemGoldenFailed"
    ]
    told = {key: text.replace("{{ $labels.member }}", member)
            for key, text in rule["annotations"].items()}  # fmt: skip
    labels = {"severity": "critical", "member": member}
    return {"exp_labels": labels, "exp_annotations": told}


def play(folder: Path, given: list[dict[str, str]], expected: dict[str, list[str]]) -> None:
    """Assert which members' alert fires at which time (``10m``)."""
    asked = [
        {
            "eval_time": at,
            "alertname": "TandemGoldenFailed",
            "exp_alerts": [golden_failed(member) for member in members],
        }
        for at, members in expected.items()
    ]
    tests = {
        "rule_files": [str(ALERTS)],
        "evaluation_interval": f"{SCRAPE_S}s",
        "tests": [{"interval": f"{SCRAPE_S}s", "input_series": given, "alert_rule_test": asked}],
    }
    file = folder / "tests.yaml"
    file.write_text(yaml.safe_dump(tests), "utf-8")
    done = subprocess.run([PROMTOOL, "test", "rules", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.prometheus
def test_a_failed_golden_check_fires_for_ten_minutes(tmp_path: Path) -> None:
    """A replica's count is born at 1 and stays, in Ray's agent; its gauge ends with the replica.

    The gauge's 0 was told by nobody who was asked to end before the next flush: it is not given.
    """
    (counted,), (passed,) = FAILED_GOLDEN_CHECKS.exposed, GOLDEN_PASSED.exposed
    given = [
        series(passed, "old", "1x240"),
        series(passed, "old", "1x240", member="densenet169"),
        series(counted, "first", "_x60 1x180"),  # after ten minutes
        series(counted, "second", "_x120 1x120"),  # Serve's next try, another ten minutes later
    ]
    expected = {
        "9m": [],
        "10m15s": ["resnet50"],
        "19m": ["resnet50"],
        "21m": ["resnet50"],
        "29m": ["resnet50"],
        "31m": [],
    }
    play(tmp_path, given, expected)


@pytest.mark.prometheus
def test_a_failed_check_is_told_of_the_member_that_failed(tmp_path: Path) -> None:
    (counted,) = FAILED_GOLDEN_CHECKS.exposed
    given = [
        series(counted, "a", "1x120"),
        series(counted, "b", "_x90 1x30", member="densenet169"),
    ]
    play(tmp_path, given, {"5m": ["resnet50"], "14m": [], "16m": ["densenet169"]})


@pytest.mark.prometheus
def test_without_failures_nothing_fires_nor_when_the_counts_end(tmp_path: Path) -> None:
    (counted,), (passed,) = FAILED_GOLDEN_CHECKS.exposed, GOLDEN_PASSED.exposed
    given = [series(passed, "a", "1x120"), series(counted, "a", "1x90 _x30")]
    play(tmp_path, given, {"12m": [], "20m": []})
