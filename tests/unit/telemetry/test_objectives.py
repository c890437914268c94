"""The alerts on burn rates: each window of each objective, when it fires and when it ends."""

import re
from pathlib import Path

import pytest
import yaml

from app.telemetry.metric_table import BUCKETS_MS, REFUSED_BEFORE, REQUEST_MS, REQUESTS
from tests.support.exposed_metrics import exposed
from tests.support.played_rules import ALERTS, play, play_expressions, series

pytestmark = pytest.mark.prometheus
CRITICAL, WARNING = {"severity": "critical"}, {"severity": "warning"}
(COUNTED,), (REFUSED,) = exposed(REQUESTS), exposed(REFUSED_BEFORE)
BUCKET = exposed(REQUEST_MS)[0]
MINUTE = 60
WINDOWS_S = {"5m": 300, "30m": 1800, "1h": 3600, "2h": 7200, "6h": 21600}
WINDOWS_S |= {"1d": 86400, "3d": 3 * 86400}


def counter(phases: list[tuple[int, int]]) -> str:
    """Return a counter's values: so many steps with so much more at each, phase after phase."""
    values, total = ["0"], 0
    for steps, each in phases:
        values.append(f"{total + each}+{each}x{steps - 1}")
        total += steps * each
    return " ".join(values)


def answers(phases: list[tuple[int, int, int]]) -> list[dict[str, str]]:
    """Return requests to classify; a phase is steps, good ones and failures at each step.

    Failures are a 503, and as many refusals by HAProxy, in turns of the same size.
    """
    tags = {"route": "/v1/classify", "operation": "classify"}
    good, bad = [(n, g) for n, g, _ in phases], [(n, b) for n, _, b in phases]
    return [
        series(COUNTED, {**tags, "status": "200"}, counter(good)),
        series(COUNTED, {**tags, "status": "503"}, counter(bad)),
        series(REFUSED, {}, counter(bad)),
        series(COUNTED, {"route": "/readyz", "operation": "other", "status": "503"}, "0+9x9999"),
    ]


def latencies(phases: list[tuple[int, int, int]]) -> list[dict[str, str]]:
    """Return the histogram of answers within 400 ms and within 600, so many of each a step."""
    fast, every = [(n, f) for n, f, _ in phases], [(n, f + s) for n, f, s in phases]
    bounds = {"400": fast, "500": fast, "1000": every, "+Inf": every}
    given = [
        series(BUCKET, {"status": "200", "le": bound}, counter(numbers))
        for bound, numbers in bounds.items()
    ]
    return [*given, series(BUCKET, {"status": "503", "le": "+Inf"}, "0+9999x9999")]


def answered(steps: int, unanswered: int) -> tuple[int, int, int]:
    """Return a phase in which ``unanswered`` of 10,000 requests are not answered."""
    return steps, 10_000 - unanswered, unanswered // 2


# 14.4 times 0.1 % is 144 of 10,000, 6 times is 60. A step of a Fast case is 150 s, 24 an hour; of a
# Slowly case 15 minutes, 4 an hour.
STEPS_S = {"Fast": 150, "Slowly": 900}
CASES = {
    "Fast-below": ([answered(48, 58)], {"10m": False, "2h": False}),
    # 20 times for most of an hour is less than 6 times of six; 10 times for two is no 14.4 times.
    "Fast-hour": ([answered(168, 0), answered(20, 200)], {"7h50m": True}),
    "Fast-six": ([answered(48, 100)], {"2h": True}),
    # Past the first hour nothing is wrong: the short windows end it, of 5 min and of 30.
    "Fast-ends": (
        [answered(24, 200), answered(48, 0)],
        {"150s": False, "450s": True, "1h": True, "65m": True, "95m": False},
    ),
    # Five minutes in which the short windows see 50 and 8 times, the long ones 4 and 1.
    "Fast-blip": ([answered(168, 0), answered(2, 500)], {"7h5m": False}),
    "Slowly-within": ([answered(400, 8)], {"100h": False}),
    "Slowly-ends": ([answered(400, 12), answered(32, 0)], {"100h": True, "107h": False}),
    "Slowly-three": ([answered(288, 0), answered(80, 40)], {"72h30m": False, "92h": True}),
}


@pytest.mark.slow  # make test plays each recorded ratio, below
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("objective", "of_budget"), [("Answered", 1), ("Latency", 10)])
def test_a_burn_rate(tmp_path: Path, name: str, objective: str, of_budget: int) -> None:
    """p99 has ten times the budget: as many slow answers of 1,000 as unanswered of 10,000."""
    phases, expected = CASES[name]
    if objective == "Latency":
        slow = [
            (n, good - (of_budget - 1) * 2 * bad, 2 * bad * of_budget) for n, good, bad in phases
        ]
        given = latencies(slow)
    else:
        given = answers(phases)
    pace = name.partition("-")[0]
    every_s = STEPS_S[pace]
    labels = CRITICAL if pace == "Fast" else WARNING
    told = {at: [labels] if fires else [] for at, fires in expected.items()}
    play(tmp_path, given, f"Tandem{objective}Burns{pace}", told, every_s)


@pytest.mark.parametrize("window", WINDOWS_S)
@pytest.mark.parametrize("kind", ["unanswered", "slow"])
def test_a_recorded_ratio_is_of_its_window(tmp_path: Path, kind: str, window: str) -> None:
    """All is well for a window, then nothing for half of one: half of it is bad."""
    every_s = WINDOWS_S[window] // 20
    phases = [(20, 100, 0), (20, 0, 50)]
    given = answers(phases) if kind == "unanswered" else latencies([(20, 100, 0), (20, 0, 100)])
    record = f"tandem:{kind}:ratio_rate{window}"
    at = f"{30 * every_s}s"
    asked = [
        {"expr": f"count({record} > 0.4 < 0.6)", "eval_time": at, "exp_samples": [{"value": 1}]}
    ]
    play_expressions(tmp_path, given, asked, every_s)


@pytest.mark.parametrize("alert", ["TandemAnsweredBurnsFast", "TandemLatencyBurnsFast"])
def test_without_requests_nothing_fires(tmp_path: Path, alert: str) -> None:
    idle = [*answers([(60, 0, 0)])[:3], *latencies([(60, 0, 0)])[:4]]
    play(tmp_path, idle, alert, {"30m": []}, MINUTE)
    play(tmp_path, [], alert, {"30m": []}, MINUTE)


def test_the_latency_objective_is_a_bucket() -> None:
    bounds = set(re.findall(r'le="(\d+)"', ALERTS.read_text("utf-8")))
    assert bounds == {"500"}
    assert bounds <= {f"{bound:g}" for bound in BUCKETS_MS}


def test_every_recorded_ratio_is_played() -> None:
    groups = yaml.safe_load(ALERTS.read_text("utf-8"))["groups"]
    records = {r["record"] for g in groups for r in g["rules"] if "record" in r}
    played = {f"tandem:{k}:ratio_rate{w}" for k in ("unanswered", "slow") for w in WINDOWS_S}
    assert records - played == {"tandem:answer_entropy:mean15m"}  # TandemDrift's
