"""The meter, and what is counted of members, requests and answers."""

import asyncio
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from app.access import Keys
from app.errors import OverloadedError
from app.http.api import ObservedRequests
from app.queueing.scheduler import ExecutedBatch, QueueReport
from app.telemetry import metric_table as table
from app.telemetry.export import start_metrics
from app.telemetry.metrics import (
    MemberMetrics,
    Meter,
    Reports,
    meter,
    record_answered,
    record_answers,
    recorded_golden_ms,
)
from tests.support.answers import VERSION, answer_of
from tests.support.cases import cases
from tests.support.instruments import Instruments
from tests.support.queued_images import NumberedCall

OK: dict[str, Any] = {"route": "/", "status": "200", "operation": "other"}
BAD = OK | {"status": "400"}
URL = "/v1/classify"


def report() -> QueueReport:
    return QueueReport(3, 0.25)


def ran(size: int, error: Exception | None = None) -> ExecutedBatch:
    return ExecutedBatch(0.0, 1.0, (NumberedCall(),) * size, error)


async def test_batches_by_size_and_the_queue_from_the_first_on(told: Instruments) -> None:
    metrics = MemberMetrics("a", report)
    metrics.executed(ran(1))
    assert told.of(table.QUEUE_LENGTH) == {("a",): 3}
    assert told.of(table.QUEUE_AGE_MS) == {("a",): 250}
    for _ in range(2):
        metrics.executed(ran(4))
    metrics.executed(ran(4, RuntimeError()))  # no work done
    assert told.of(table.BATCHES) == {("a", "1"): 1, ("a", "4"): 2}
    assert told.of(table.MEMBER_IMAGES) == {("a",): 9}
    assert told.of(table.FAILED_BATCHES) == {("a",): 1}


def test_a_golden_check_that_fails_is_told_before_the_error_goes_on(told: Instruments) -> None:
    """The replica ends within a second: the meter's next regular flush would be too late."""
    taken_ms = recorded_golden_ms("a", lambda: None)
    assert told.of(table.GOLDEN_PASSED) == {("a",): 1}
    assert told.of(table.GOLDEN_MS) == {("a",): taken_ms}
    assert taken_ms >= 0

    def check() -> None:
        raise ValueError("another answer")

    with pytest.raises(ValueError, match="another answer"):
        recorded_golden_ms("a", check)
    at_once = {name: dict(series) for name, series in told.values.items()}
    assert at_once[table.GOLDEN_PASSED.name] == {("a",): 0}
    assert at_once[table.FAILED_GOLDEN_CHECKS.name] == {("a",): 1}
    assert told.of(table.FAILED_GOLDEN_CHECKS) == {("a",): 1}  # once, whenever the next flush is


async def test_the_queues_of_a_members_versions_count_together(told: Instruments) -> None:
    """A shadow's empty queue does not hide that clients wait for the other version."""
    alike: Reports = {}
    main = MemberMetrics("a", report, alike)
    shadow = MemberMetrics("a", lambda: QueueReport(1, 0.0), alike)

    def check(length: int, age_ms: float) -> None:
        assert told.of(table.QUEUE_LENGTH) == {("a",): length}
        assert told.of(table.QUEUE_AGE_MS) == {("a",): age_ms}

    for metrics in (main, shadow):
        metrics.executed(ran(1))
    check(4, 250)
    main.close()
    check(1, 0)
    shadow.close()
    check(0, 0)
    assert shadow._watching is not None
    assert shadow._watching.cancelled()


async def test_the_last_batch_of_a_member_that_goes_is_no_beginning(told: Instruments) -> None:
    metrics = MemberMetrics("a", report)
    metrics.close()
    metrics.executed(ran(1))
    assert told.of(table.MEMBER_IMAGES) == {("a",): 1}
    assert metrics._watching is None


def test_counts_are_gathered_and_handed_on_once_and_a_gauge_again_and_again(told):
    for _ in range(3):
        meter.count(table.REQUESTS, **OK)
    meter.count(table.REQUESTS, by=2, **BAD)
    for nothing in (0, float("nan")):
        meter.count(table.REQUESTS, by=nothing, **(OK | {"status": "422"}))
    for _ in range(2):
        assert told.of(table.REQUESTS) == {("/", "200", "other"): 3, ("/", "400", "other"): 2}
    meter.set(table.QUEUE_LENGTH, 4, member="a")
    for _ in range(2):
        assert told.of(table.QUEUE_LENGTH) == {("a",): 4}
        told.values.clear()


def test_nothing_is_lost_between_threads(told: Instruments) -> None:
    def count() -> None:
        for _ in range(2000):
            meter.count(table.REQUESTS, **OK)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        meter.flush()
    assert told.of(table.REQUESTS) == {("/", "200", "other"): 8000}


def test_flushes_on_several_threads_lose_nothing(told: Instruments) -> None:
    """A member that is loaded later records its golden check on a thread of its own."""
    for _ in range(3000):
        record_answered("/v1/classify", 200, 1.0)
    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda _: meter.flush(), range(4)))
    finally:
        sys.setswitchinterval(switch_s)
    assert meter.is_on
    assert told.observed(table.REQUEST_MS) == {("200",): 3000}


def test_a_histogram_goes_out_as_prometheus_has_them(told: Instruments) -> None:
    for value in (0.1, 45, 50, 20_000):  # a bound belongs to its bucket
        meter.observe(table.REQUEST_MS, value, status="200")
    assert told.observed(table.REQUEST_MS) == {("200",): 4}
    bucket, total, _ = table.REQUEST_MS.parts
    assert told.of(total) == {("200",): 20_095.1}
    buckets = {key[-1]: number for key, number in told.of(bucket).items()}
    assert [buckets[bound] for bound in ("0.25", "40", "50", "10000", "+Inf")] == [1, 1, 3, 3, 4]


def test_ray_in_trouble_switches_it_off_with_one_warning(told, caplog):
    told.raises = RuntimeError("no core worker")
    for _ in range(3):
        meter.count(table.REQUESTS, **OK)
        meter.flush()
    assert not meter.is_on
    (warning,) = caplog.messages
    assert "no core worker" in warning
    assert "requests are served as before" in warning


def test_it_does_nothing_until_it_is_started_which_happens_once() -> None:
    start_metrics()  # no replica, no metrics
    assert not meter.is_on
    idle = Meter()
    idle.count(table.REQUESTS, **OK)
    idle.set(table.QUEUE_LENGTH, 1, member="a")
    idle.observe(table.REQUEST_MS, 1, status="200")
    idle.flush()
    assert not idle.is_on
    made: list[Any] = []
    assert idle.start(made.append)
    assert not idle.start(made.append)
    assert len(made) == len({part.name for part in made}) >= len(table.METRICS)


def test_the_table_is_what_prometheus_takes() -> None:
    assert len({metric.name for metric in table.METRICS}) == len(table.METRICS)
    for metric in table.METRICS:
        assert metric.name.startswith("tandem_")
        assert metric.text
        assert not {"deployment", "replica", "application"} & set(metric.tags)  # Serve's own
    assert list(table.BUCKETS_MS) == sorted(set(table.BUCKETS_MS))


# Requests through the real interface, counted whatever becomes of them, and what is answered.


async def test_a_good_request(told, client):
    assert (await client.post(URL, content=b"image")).status_code == 200
    assert told.of(table.REQUESTS) == {(URL, "200", "classify"): 1}
    assert told.observed(table.REQUEST_MS) == {("200",): 1}
    assert told.observed(table.STAGE_MS) == {("encode", "none"): 1}  # the graph is a fake
    (total_ms,) = told.of(table.REQUEST_MS.parts[1]).values()
    (encode_ms,) = told.of(table.STAGE_MS.parts[1]).values()
    assert 0 < encode_ms < total_ms


@cases("error, status", (OverloadedError("full"), "429"), (ValueError("a bug"), "500"))
async def test_a_request_that_fails(told, client, service, error, status):
    service.raises = error
    assert (await client.post(URL, content=b"image")).status_code == int(status)
    assert told.of(table.REQUESTS) == {(URL, status, "classify"): 1}


async def test_paths_that_are_no_route_are_one(told, client):
    for path in ("/wp-admin", "/.env", "/v1/nothing", "/healthz"):
        await client.get(path)
    numbers = {("other", "404", "other"): 3, ("/healthz", "200", "other"): 1}
    assert told.of(table.REQUESTS) == numbers
    assert told.observed(table.REQUEST_MS) == {}  # only photos are measured


async def test_a_client_that_goes_away(told: Instruments) -> None:
    async def cancelled(*_: object) -> Any:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await ObservedRequests(cancelled, Keys([]))({"type": "http"}, cancelled, cancelled)
    assert told.of(table.REQUESTS) == {("other", "499", "other"): 1}


async def test_without_metrics_no_loop_is_needed_and_requests_are_answered(client):
    await asyncio.to_thread(MemberMetrics("a", report).executed, ran(1))
    assert (await client.post(URL, content=b"image")).status_code == 200


def test_agreement_degraded_answers_and_skipped_members(told: Instruments) -> None:
    answers = [answer_of(), answer_of(sure=True), answer_of(agreement=False, sure=False)]
    answers += [answer_of("a", degraded=True)]
    answers += [answer_of("a", skipped=names) for names in ("bc", "b")]
    record_answers(answers, 0.0, [])
    assert told.of(table.SKIPPED) == {("b",): 2, ("c",): 1}
    assert told.of(table.ANSWERS) == {
        ("yes", "no", "unknown", VERSION): 1,
        ("yes", "no", "yes", VERSION): 1,
        ("no", "no", "no", VERSION): 1,
        ("alone", "yes", "unknown", VERSION): 1,
        ("alone", "no", "unknown", VERSION): 2,
    }
