"""The meter gathers, hands on once, and is never a request's trouble."""

import sys
import threading
from typing import Any

import pytest

from app.metrics.meter import Meter, meter
from app.metrics.replica import start_metrics
from app.metrics.requests import record_answered
from app.metrics.table import BUCKETS_MS, METRICS, QUEUE_LENGTH, REQUEST_MS, REQUESTS
from tests.support.instruments import Instruments

OK: dict[str, Any] = {"route": "/", "status": "200", "operation": "other"}
BAD = OK | {"status": "400"}


def test_counts_are_gathered_and_handed_on_once(told: Instruments) -> None:
    for _ in range(3):
        meter.count(REQUESTS, **OK)
    meter.count(REQUESTS, by=2, **BAD)
    assert told.of(REQUESTS) == {("/", "200", "other"): 3, ("/", "400", "other"): 2}
    assert told.of(REQUESTS) == {("/", "200", "other"): 3, ("/", "400", "other"): 2}


def test_nothing_is_no_count(told: Instruments) -> None:
    meter.count(REQUESTS, by=0, **OK)
    meter.count(REQUESTS, by=float("nan"), **OK)
    assert told.of(REQUESTS) == {}


def test_a_gauge_is_told_again_and_again(told: Instruments) -> None:
    meter.set(QUEUE_LENGTH, 4, member="a")
    assert told.of(QUEUE_LENGTH) == {("a",): 4}
    told.values.clear()
    assert told.of(QUEUE_LENGTH) == {("a",): 4}


def test_nothing_is_lost_between_threads(told: Instruments) -> None:
    def count() -> None:
        for _ in range(2000):
            meter.count(REQUESTS, **OK)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        meter.flush()
    assert told.of(REQUESTS) == {("/", "200", "other"): 8000}


def test_flushes_on_several_threads_lose_nothing(told: Instruments) -> None:
    """A member that is loaded later records its golden check on a thread of its own."""
    for _ in range(3000):
        record_answered("/v1/classify", 200, 1.0)
    threads = [threading.Thread(target=meter.flush) for _ in range(4)]
    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(switch_s)
    assert meter.is_on
    assert told.observed(REQUEST_MS) == {("200",): 3000}


def test_a_histogram_goes_out_as_prometheus_has_them(told: Instruments) -> None:
    for value in (0.1, 45, 50, 20_000):  # a bound belongs to its bucket
        meter.observe(REQUEST_MS, value, status="200")
    assert told.observed(REQUEST_MS) == {("200",): 4}
    bucket, total, _ = REQUEST_MS.parts
    assert told.of(total) == {("200",): 20_095.1}
    buckets = {key[-1]: number for key, number in told.of(bucket).items()}
    assert [buckets[bound] for bound in ("0.25", "40", "50", "10000", "+Inf")] == [1, 1, 3, 3, 4]


def test_ray_in_trouble_switches_it_off_with_one_warning(
    told: Instruments, caplog: pytest.LogCaptureFixture
) -> None:
    told.raises = RuntimeError("no core worker")
    for _ in range(3):
        meter.count(REQUESTS, **OK)
        meter.flush()
    assert not meter.is_on
    (warning,) = caplog.messages
    assert "no core worker" in warning
    assert "requests are served as before" in warning


def test_it_does_nothing_until_it_is_started() -> None:
    idle = Meter()
    idle.count(REQUESTS, **OK)
    idle.set(QUEUE_LENGTH, 1, member="a")
    idle.observe(REQUEST_MS, 1, status="200")
    idle.flush()
    assert not idle.is_on


def test_it_is_started_once() -> None:
    started = Meter()
    made: list[Any] = []
    assert started.start(made.append)
    assert not started.start(made.append)
    assert len(made) == len({part.name for part in made}) >= len(METRICS)


def test_no_replica_no_metrics() -> None:
    start_metrics()
    assert not meter.is_on


def test_the_table_is_what_prometheus_takes() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert metric.name.startswith("tandem_")
        assert metric.text
        assert not {"deployment", "replica", "application"} & set(metric.tags)  # Serve's own
    assert list(BUCKETS_MS) == sorted(set(BUCKETS_MS))
