"""Every alert over series that must fire it and over series that must not, played by promtool."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from app.telemetry.metric_table import (
    ANSWERS,
    CLOCK_STEPS,
    DROPPED_SPANS,
    ENTROPY,
    PROCESS_MEMORY,
    QUEUE_AGE_MS,
    REFUSED_BEFORE,
    REQUESTS,
    TRAFFIC_COMPARED,
)
from app.telemetry.metrics import CLASSIFY, record_answered
from tests.support.exposed_metrics import exposed
from tests.support.instruments import Instruments
from tests.support.played_rules import ALERTS, Labels, play, series

pytestmark = pytest.mark.prometheus
OBJECTIVES, PACES = ("TandemAnswered", "TandemLatency"), ("Fast", "Slowly")
CRITICAL, WARNING, INFO = ({"severity": name} for name in ("critical", "warning", "info"))
# test_golden_alert.py, test_objectives.py
PLAYED_ELSEWHERE = {"TandemGoldenFailed", *(f"{o}Burns{h}" for o in OBJECTIVES for h in PACES)}
(COUNTED,), (REFUSED,), (ENTROPIES,), (ANSWERED,), (COMPARED,) = (
    exposed(metric) for metric in (REQUESTS, REFUSED_BEFORE, ENTROPY, ANSWERS, TRAFFIC_COMPARED)
)


@dataclass(frozen=True)
class Case:
    """Series, and with which labels an alert fires at which time."""

    alert: str
    series: list[dict[str, str]]
    expected: dict[str, list[Labels]]
    every_s: int = 10
    name: str = field(default="fires")


def replicas(deployment: str, values: str) -> dict[str, str]:
    return series(exposed(PROCESS_MEMORY)[0], {"deployment": deployment}, values)


def drifting(later: int, quiet: int = 0) -> list[dict[str, str]]:
    """Return 25 hours of answers with a mean entropy of 0.2, then two with ``later`` tenths.

    In the first hours nothing is answered for ``quiet`` times five minutes.
    """
    busy = 300 - quiet - 100
    answers = f"0+100x100 10000x{quiet - 1} 10100+100x{busy + 23}" if quiet else "0+100x324"
    entropy = f"0+20x100 2000x{quiet - 1} 2020+20x{busy - 1}" if quiet else "0+20x300"
    end = 20 * (100 + busy if quiet else 300)
    return [
        series(ANSWERED, {"agreed": "yes", "degraded": "no", "sure": "yes"}, answers),
        series(ENTROPIES, {}, f"{entropy} {end + 10 * later}+{10 * later}x23"),
    ]


def compared(version: str, yes: int, no: int) -> list[dict[str, str]]:
    """Return the photos that agreed and disagreed, each 10 s for 15 minutes."""
    numbers = {"no": no, "yes": yes}
    return [
        series(COMPARED, {"model_version": version, "agreed": agreed}, f"0+{number}x90")
        for agreed, number in numbers.items()
    ]


CASES = [
    Case(
        "TandemNoReplica",
        [replicas("Decoder", "1x60")],
        {"30s": [], "2m": [{"deployment": "Gateway", **CRITICAL}]},
    ),
    Case("TandemNoReplica", [replicas("Gateway", "1x60")], {"2m": [], "9m": []}, name="is there"),
    Case(
        "TandemQueueOld",
        [
            series(exposed(QUEUE_AGE_MS)[0], {"member": "hung"}, "0x6 3000x60"),
            series(exposed(QUEUE_AGE_MS)[0], {"member": "busy"}, "1500x66"),
        ],
        {"1m": [], "3m": [{"member": "hung", **WARNING}]},
    ),
    Case("TandemDrift", drifting(later=4), {"24h": [], "26h30m": [WARNING]}, every_s=300),
    Case("TandemDrift", drifting(later=4, quiet=6), {"24h": [], "26h30m": [WARNING]}, every_s=300,
         name="after a quiet half hour"),
    Case("TandemDrift", drifting(later=2), {"26h30m": []}, every_s=300, name="as before"),
    Case(
        "TandemSpansDropped",
        [
            series(exposed(DROPPED_SPANS)[0], {"sink": "otlp"}, "0x30 1+1x60"),
            series(exposed(DROPPED_SPANS)[0], {"sink": "local"}, "7x91"),
        ],
        {"5m": [], "11m": [{"sink": "otlp", **WARNING}]},
    ),
    Case(
        "TandemVersionsDisagree",
        compared("bad", yes=4, no=6) + compared("good", yes=19, no=1),
        {"4m": [], "12m": [{"model_version": "bad", **WARNING}]},
    ),
    Case("TandemVersionsDisagree", [*compared("bad", yes=0, no=1)[:1]], {"12m": []},
         every_s=60, name="too few"),
    Case("TandemClockSet", [series(exposed(CLOCK_STEPS)[0], {}, "0x30 1x120")],
         {"4m": [], "6m": [INFO], "20m": []}),
    Case("TandemOverloaded", [series(REFUSED, {}, "0+10x90")], {"12m": [WARNING]},
         name="all by HAProxy"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.alert}-{case.name}")
def test_an_alert(tmp_path: Path, case: Case) -> None:
    play(tmp_path, case.series, case.alert, case.expected, case.every_s)


def counted(told: Instruments, rates: dict[tuple[str, int], int]) -> list[dict[str, str]]:
    """Return what is counted of so many answers, by route and status, each 10 s for 15 minutes."""
    for route, status in rates:
        record_answered(route, status, 10.0)
    by_tags = [dict(zip(REQUESTS.tags, values, strict=True)) for values in told.of(REQUESTS)]
    return [
        series(COUNTED, tags, f"0+{rates[tags['route'], int(tags['status'])]}x90")
        for tags in by_tags
    ]


@pytest.mark.slow  # make test plays one case of each alert, above
@pytest.mark.parametrize("route", sorted(CLASSIFY))
@pytest.mark.parametrize(
    ("alert", "status", "labels"),
    [
        ("TandemAnsweredBurnsFast", 503, CRITICAL),
        ("TandemAnsweredBurnsFast", 429, CRITICAL),
        ("TandemOverloaded", 429, WARNING),
    ],
)
def test_a_route_that_fails_is_told_of(
    told: Instruments, tmp_path: Path, route: str, alert: str, status: int, labels: Labels
) -> None:
    """Answers of other routes do not thin it out: probes alone may be most of the requests."""
    given = counted(told, {(route, status): 5, (route, 200): 20, ("/healthz", 200): 10_000})
    play(tmp_path, given, alert, {"1m": [], "12m": [labels]})


@pytest.mark.parametrize("alert", ["TandemAnsweredBurnsFast", "TandemOverloaded"])
def test_few_failures_and_those_of_other_routes_are_not(
    told: Instruments, tmp_path: Path, alert: str
) -> None:
    rates = {(route, status): 1 for route in CLASSIFY for status in (429, 503)}
    rates |= {(route, 200): 1000 for route in CLASSIFY}
    given = counted(told, rates | {("/readyz", 503): 10_000, ("other", 429): 10_000})
    play(tmp_path, given, alert, {"12m": []})


def test_no_alert_is_without_a_case() -> None:
    rules = [r for g in yaml.safe_load(ALERTS.read_text("utf-8"))["groups"] for r in g["rules"]]
    alerts = {rule["alert"] for rule in rules if "alert" in rule}
    assert alerts == {case.alert for case in CASES} | PLAYED_ELSEWHERE
