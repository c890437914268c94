"""The alert rules, played by promtool over series as they really come."""

import json
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from app.telemetry import metric_table as table
from app.telemetry.metrics import CLASSIFY, record_answered
from tests.support.cases import cases
from tests.support.exposed_metrics import exposed
from tests.support.prometheus_programs import PROMTOOL

pytestmark = pytest.mark.prometheus
ALERTS = Path(__file__).parents[3] / "configs" / "prometheus" / "alerts.yaml"
Labels = Mapping[str, str]
OBJECTIVES, PACES = ("TandemAnswered", "TandemLatency"), ("Fast", "Slowly")
CRITICAL, WARNING, INFO = ({"severity": name} for name in ("critical", "warning", "info"))
# The golden check and the burn rates, below.
PLAYED_BELOW = {"TandemGoldenFailed", *(f"{o}Burns{h}" for o in OBJECTIVES for h in PACES)}
(COUNTED,), (REFUSED,), (ENTROPIES,), (ANSWERED,), (COMPARED,) = (
    exposed(metric)
    for metric in (
        table.REQUESTS,
        table.REFUSED_BEFORE,
        table.ENTROPY,
        table.ANSWERS,
        table.TRAFFIC_COMPARED,
    )
)
ALERT = "TandemGoldenFailed"
(FAILED,), (PASSED,) = exposed(table.FAILED_GOLDEN_CHECKS), exposed(table.GOLDEN_PASSED)


def series(name: str, labels: Labels, values: str) -> dict[str, str]:
    """Return an input series; ``values`` in promtool's notation (``0+5x60``: 0, 5, 10, ...)."""
    told = ",".join(f'{key}="{value}"' for key, value in labels.items())
    return {"series": f"{name}{{{told}}}", "values": values}


def play(folder, given, alert, expected, every_s=10):
    """Assert with which labels ``alert`` fires at which time (``10m``).

    ``every_s`` is the time between two values, and between two looks at the rules.
    """
    asked = [
        {
            "expr": f'ALERTS{{alertname="{alert}",alertstate="firing"}}',
            "eval_time": at,
            "exp_samples": [{"labels": _firing(alert, labels), "value": 1} for labels in firing],
        }
        for at, firing in expected.items()
    ]
    play_expressions(folder, given, asked, every_s)


def play_expressions(folder, given, asked, every_s):
    """Assert what expressions say: ``asked`` as promtool's ``promql_expr_test``."""
    test = {"interval": f"{every_s}s", "input_series": list(given), "promql_expr_test": list(asked)}
    tests = {"rule_files": [str(ALERTS)], "evaluation_interval": f"{every_s}s", "tests": [test]}
    file = folder / "tests.yaml"
    file.write_text(yaml.safe_dump(tests), "utf-8")
    done = subprocess.run([str(PROMTOOL), "test", "rules", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def _firing(alert: str, labels: Labels) -> str:
    every = {"alertname": alert, "alertstate": "firing", **labels}
    return "ALERTS{" + ",".join(f'{key}="{value}"' for key, value in every.items()) + "}"


@dataclass(frozen=True)
class Case:
    """Series, and with which labels an alert fires at which time."""

    alert: str
    series: list[dict[str, str]]
    expected: dict[str, list[Labels]]
    every_s: int = 10
    name: str = field(default="fires")


def replicas(deployment: str, values: str) -> dict[str, str]:
    return series(exposed(table.PROCESS_MEMORY)[0], {"deployment": deployment}, values)


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


def ages(member: str, values: str) -> dict[str, str]:
    return series(exposed(table.QUEUE_AGE_MS)[0], {"member": member}, values)


def dropped(sink: str, values: str) -> dict[str, str]:
    return series(exposed(table.DROPPED_SPANS)[0], {"sink": sink}, values)


def compared(version: str, yes: int, no: int) -> list[dict[str, str]]:
    """Return the photos that agreed and disagreed, each 10 s for 15 minutes."""
    numbers = {"no": no, "yes": yes}
    return [
        series(COMPARED, {"model_version": version, "agreed": agreed}, f"0+{number}x90")
        for agreed, number in numbers.items()
    ]


CLOCK_SET = [series(exposed(table.CLOCK_STEPS)[0], {}, "0x30 1x120")]
GONE, HUNG = CRITICAL | {"deployment": "Gateway"}, WARNING | {"member": "hung"}
LOST, BAD = WARNING | {"sink": "otlp"}, WARNING | {"model_version": "bad"}
DISAGREEING = compared("bad", yes=4, no=6) + compared("good", yes=19, no=1)
CASES = [
    Case("TandemNoReplica", [replicas("Decoder", "1x60")], {"30s": [], "2m": [GONE]}),
    Case("TandemNoReplica", [replicas("Gateway", "1x60")], {"2m": [], "9m": []}, name="is there"),
    Case("TandemQueueOld", [ages("hung", "0x6 3000x60"), ages("busy", "1500x66")],
         {"1m": [], "3m": [HUNG]}),
    Case("TandemDrift", drifting(later=4), {"24h": [], "26h30m": [WARNING]}, every_s=300),
    Case("TandemDrift", drifting(later=4, quiet=6), {"24h": [], "26h30m": [WARNING]}, every_s=300,
         name="after a quiet half hour"),
    Case("TandemDrift", drifting(later=2), {"26h30m": []}, every_s=300, name="as before"),
    Case("TandemSpansDropped", [dropped("otlp", "0x30 1+1x60"), dropped("local", "7x91")],
         {"5m": [], "11m": [LOST]}),
    Case("TandemVersionsDisagree", DISAGREEING, {"4m": [], "12m": [BAD]}),
    Case("TandemVersionsDisagree", [*compared("bad", yes=0, no=1)[:1]], {"12m": []},
         every_s=60, name="too few"),
    Case("TandemClockSet", CLOCK_SET, {"4m": [], "6m": [INFO], "20m": []}),
    Case("TandemOverloaded", [series(REFUSED, {}, "0+10x90")], {"12m": [WARNING]},
         name="all by HAProxy"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.alert}-{case.name}")
def test_an_alert(tmp_path: Path, case: Case) -> None:
    play(tmp_path, case.series, case.alert, case.expected, case.every_s)


def counted(told, rates):
    """Return what is counted of so many answers, by route and status, each 10 s for 15 minutes."""
    for route, status in rates:
        record_answered(route, status, 10.0)
    by_tags = [
        dict(zip(table.REQUESTS.tags, values, strict=True)) for values in told.of(table.REQUESTS)
    ]
    return [
        series(COUNTED, tags, f"0+{rates[tags['route'], int(tags['status'])]}x90")
        for tags in by_tags
    ]


@pytest.mark.slow  # make test plays one case of each alert, above
@pytest.mark.parametrize("route", sorted(CLASSIFY))
@cases(
    "alert, status, labels",
    ("TandemAnsweredBurnsFast", 503, CRITICAL),
    ("TandemAnsweredBurnsFast", 429, CRITICAL),
    ("TandemOverloaded", 429, WARNING),
)
def test_a_route_that_fails_is_told_of(told, tmp_path, route, alert, status, labels):
    """Answers of other routes do not thin it out: probes alone may be most of the requests."""
    given = counted(told, {(route, status): 5, (route, 200): 20, ("/healthz", 200): 10_000})
    play(tmp_path, given, alert, {"1m": [], "12m": [labels]})


@pytest.mark.parametrize("alert", ["TandemAnsweredBurnsFast", "TandemOverloaded"])
def test_few_failures_and_those_of_other_routes_are_not(told, tmp_path, alert):
    rates = {(route, status): 1 for route in CLASSIFY for status in (429, 503)}
    rates |= {(route, 200): 1000 for route in CLASSIFY}
    given = counted(told, rates | {("/readyz", 503): 10_000, ("other", 429): 10_000})
    play(tmp_path, given, alert, {"12m": []})


def test_no_alert_and_no_recorded_ratio_is_without_a_case() -> None:
    groups = yaml.safe_load(ALERTS.read_text("utf-8"))["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    alerts = {rule["alert"] for rule in rules if "alert" in rule}
    assert alerts == {case.alert for case in CASES} | PLAYED_BELOW
    records = {rule["record"] for rule in rules if "record" in rule}
    played = {f"tandem:{k}:ratio_rate{w}" for k in ("unanswered", "slow") for w in WINDOWS_S}
    assert records - played == {"tandem:answer_entropy:mean15m"}  # TandemDrift's


# The golden check's alert over series as they really come, played by promtool.


def of_member(name: str, replica: str, values: str, member: str = "resnet50") -> dict[str, str]:
    return series(name, {"member": member, "replica": replica, "deployment": "Gateway"}, values)


def failed(member: str) -> list[Labels]:
    return [CRITICAL | {"member": member}]


def test_a_failed_golden_check_fires_for_ten_minutes(tmp_path: Path) -> None:
    """A replica's count is born at 1 and stays, in Ray's agent; its gauge ends with the replica.

    The gauge's 0 was told by nobody who was asked to end before the next flush: it is not given.
    """
    given = [
        of_member(PASSED, "old", "1x240"),
        of_member(PASSED, "old", "1x240", member="densenet169"),
        of_member(FAILED, "first", "_x60 1x180"),  # after ten minutes
        of_member(FAILED, "second", "_x120 1x120"),  # Serve's next try, another ten minutes later
    ]
    fires = {"9m": False, "10m15s": True, "19m": True, "21m": True, "29m": True, "31m": False}
    play(tmp_path, given, ALERT, {at: failed("resnet50") if f else [] for at, f in fires.items()})


def test_a_failed_check_is_told_of_its_member_and_nothing_without_one(tmp_path):
    given = [
        of_member(FAILED, "a", "1x120"),
        of_member(FAILED, "b", "_x90 1x30", member="densenet169"),
    ]
    expected = {"5m": failed("resnet50"), "14m": [], "16m": failed("densenet169")}
    play(tmp_path, given, ALERT, expected)
    given = [of_member(PASSED, "a", "1x120"), of_member(FAILED, "a", "1x90 _x30")]
    play(tmp_path, given, ALERT, {"12m": [], "20m": []})


# The alerts on burn rates: each window of each objective, when it fires and when it ends.


BUCKET = exposed(table.REQUEST_MS)[0]
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
    probes = {"route": "/readyz", "operation": "other", "status": "503"}
    good, bad = [(n, g) for n, g, _ in phases], [(n, b) for n, _, b in phases]
    return [
        series(COUNTED, {**tags, "status": "200"}, counter(good)),
        series(COUNTED, {**tags, "status": "503"}, counter(bad)),
        series(REFUSED, {}, counter(bad)),
        series(COUNTED, probes, "0+9x9999"),
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
BURN_RATES = {
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
@pytest.mark.parametrize("name", BURN_RATES)
@pytest.mark.parametrize("objective", ["Answered", "Latency"])
def test_a_burn_rate(tmp_path: Path, name: str, objective: str) -> None:
    """p99 has ten times the budget: as many slow answers of 1,000 as unanswered of 10,000."""
    phases, expected = BURN_RATES[name]
    slow = [(steps, good - 18 * bad, 20 * bad) for steps, good, bad in phases]
    given = latencies(slow) if objective == "Latency" else answers(phases)
    pace = name.partition("-")[0]
    labels = CRITICAL if pace == "Fast" else WARNING
    told = {at: [labels] if fires else [] for at, fires in expected.items()}
    play(tmp_path, given, f"Tandem{objective}Burns{pace}", told, STEPS_S[pace])


@pytest.mark.parametrize("window", WINDOWS_S)
@pytest.mark.parametrize("kind", ["unanswered", "slow"])
def test_a_recorded_ratio_is_of_its_window(tmp_path: Path, kind: str, window: str) -> None:
    """All is well for a window, then nothing for half of one: half of it is bad."""
    every_s = WINDOWS_S[window] // 20
    of_kind = {"unanswered": answers([(20, 100, 0), (20, 0, 50)])}
    given = of_kind.get(kind) or latencies([(20, 100, 0), (20, 0, 100)])
    expression = f"count(tandem:{kind}:ratio_rate{window} > 0.4 < 0.6)"
    asked = {"expr": expression, "eval_time": f"{30 * every_s}s", "exp_samples": [{"value": 1}]}
    play_expressions(tmp_path, given, [asked], every_s)


@pytest.mark.parametrize("alert", ["TandemAnsweredBurnsFast", "TandemLatencyBurnsFast"])
def test_without_requests_nothing_fires(tmp_path: Path, alert: str) -> None:
    idle = [*answers([(60, 0, 0)])[:3], *latencies([(60, 0, 0)])[:4]]
    play(tmp_path, idle, alert, {"30m": []}, MINUTE)
    play(tmp_path, [], alert, {"30m": []}, MINUTE)


def test_the_latency_objective_is_a_bucket() -> None:
    bounds = set(re.findall(r'le="(\d+)"', ALERTS.read_text("utf-8")))
    assert bounds == {"500"}
    assert bounds <= {f"{bound:g}" for bound in table.BUCKETS_MS}


@cases(
    "statuses, shares",
    ({}, (0, 0)),
    ({"200": "0+0x60"}, (0, 0)),
    ({"200": "0+9x60"}, (0, 0)),
    ({"200": "0+9x60", "500": "0+1x60"}, (0.1, 0)),
    ({"200": "0+9x60", "429": "0+1x60"}, (0, 0.1)),
    ({"503": "0+1x60"}, (1, 0)),
    ids=["no metric", "no request", "no error", "5xx", "429", "5xx alone"],
)
def test_the_panel_of_errors_shows_zero_where_there_are_none(tmp_path, statuses, shares):
    panels = json.loads((ALERTS.parents[1] / "grafana/tandem.json").read_text("utf-8"))["panels"]
    (errors,) = (panel for panel in panels if panel["title"] == "Errors")
    given = [
        series(COUNTED, {"operation": "classify", "status": status}, values)
        for status, values in statuses.items()
    ]
    asked = [
        {
            "expr": target["expr"].replace("$__rate_interval", "1m"),
            "eval_time": "5m",
            "exp_samples": [{"labels": "{}", "value": share}],
        }
        for target, share in zip(errors["targets"], shares, strict=True)
    ]
    play_expressions(tmp_path, given, asked, 10)
