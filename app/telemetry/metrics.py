"""Metrics: the meter of this process, the observer of a request, and records of all else.

The meter aggregates, and sends to Ray every few seconds: a call of Ray's API costs microseconds, a
call here a tenth of that. Nothing raises: the first error is logged and stops the meter, so that
requests are not affected.

The observer times a request's stages once, for timings, spans and metrics. Other processes report
durations only, so that nodes need no common clock. The time that a member reports is placed in the
middle of the call that the Gateway timed; the rest is transport.
"""

import asyncio
import logging
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

from app.access import RESULTS
from app.answers import Classified, MemberAnswer, StageTiming, Timings
from app.queueing.scheduler import ExecutedBatch, QueueReport
from app.telemetry import metric_table as table
from app.telemetry.metric_table import BUCKETS_MS, METRICS, Metric
from app.telemetry.spans import Value, current_parent, name_answerers, record

logger = logging.getLogger("ray.serve")
Tags = tuple[tuple[str, str], ...]
Series = tuple[str, Tags]  # a metric's name and tags
BOUNDS = (*(f"{bound:g}" for bound in BUCKETS_MS), "+Inf")
QUEUE_EVERY_S = 1.0
Reports = dict["MemberMetrics", QueueReport]  # the last report of each queue
INFER = "/v2/models/{model_name}/infer"
INFER_VERSION = "/v2/models/{model_name}/versions/{model_version}/infer"
PREDICT = "/v1/models/{model_name}:predict"
PREDICT_VERSION = "/v1/models/{model_name}/versions/{model_version}:predict"
INVOCATIONS = "/invocations"  # SageMaker's, and Vertex AI's by HAProxy
# The routes that classify images, over HTTP and gRPC. Their latency is measured; alerts and
# dashboard select them by the tag ``operation``.
CLASSIFY = frozenset((INFER, INFER_VERSION, PREDICT, PREDICT_VERSION, INVOCATIONS)) | {
    *("/v1/classify", "/tandem.v1.Ensemble/Classify", "/inference.GRPCInferenceService/ModelInfer"),
    "/tensorflow.serving.PredictionService/Predict",
}
SURE = {True: "yes", False: "no", None: "unknown"}
HIDDEN = "hidden"  # for the names of keys, which not everybody who reads metrics may know
CLIENT_WENT = 499  # nginx's status for a client that hung up; it is never sent
StageDuration = tuple[Tags, float]  # the tags of a stage (stage_tags), and ms


class Meter:
    """Collects metrics once :meth:`start` was called; before that, does nothing."""

    def __init__(self) -> None:
        self.is_on = self.has_key_names = False
        self._instruments: dict[str, Any] = {}
        self._counts: dict[Series, float] = {}  # since the last flush
        self._levels: dict[Series, float] = {}
        self._histograms: dict[Series, _Histogram] = {}
        self._lock = threading.Lock()

    def start(self, make: Callable[[Metric], Any]) -> bool:
        """Make an instrument for every metric with ``make``; return False if that was done before.

        All stages of a process share the meter, and each of them starts it.
        """
        with self._lock:
            if self._instruments:
                return False
            parts = [part for metric in METRICS for part in metric.parts]
            self._instruments = {part.name: make(part) for part in parts}
            self.is_on = True
            return True

    def count(self, metric: Metric, by: float = 1.0, **tags: str) -> None:
        if self.is_on and by > 0:
            if "key" in tags and not self.has_key_names:
                tags["key"] = HIDDEN
            series = (metric.name, tuple(tags.items()))
            with self._lock:
                self._counts[series] = self._counts.get(series, 0.0) + by

    def set(self, metric: Metric, value: float, **tags: str) -> None:
        if self.is_on:
            with self._lock:
                self._levels[metric.name, tuple(tags.items())] = value

    def observe(self, metric: Metric, value: float, **tags: str) -> None:
        """Add a value to a metric's histogram."""
        self.observe_all(metric, [(tuple(tags.items()), value)])

    def observe_all(self, metric: Metric, values: Iterable[tuple[Tags, float]]) -> None:
        """Add values to a metric's histograms, each to that of its tags."""
        if not self.is_on:
            return
        with self._lock:
            for tags, value in values:
                if (histogram := self._histograms.get((metric.name, tags))) is None:
                    histogram = self._histograms[metric.name, tags] = _Histogram()
                histogram.add(value)

    def flush(self, record: Callable[[], None] = lambda: None) -> None:
        """Send everything to Ray; gauges too, since Ray forgets a gauge that is not set again.

        ``record`` is called first: it records figures that are read only now.
        """
        try:
            record()
            with self._lock:
                counts, self._counts = self._counts, {}
                levels = dict(self._levels)
                for (name, tags), histogram in self._histograms.items():
                    levels |= histogram.levels(name, tags)
            for (name, tags), amount in counts.items():
                self._instruments[name].inc(amount, dict(tags))
            for (name, tags), value in levels.items():
                self._instruments[name].set(value, dict(tags))
        except Exception as error:
            if self.is_on:
                self.is_on = False
                text = "metrics are off from here on, requests are served as before: %s: %s"
                logger.warning(text, type(error).__name__, error)


class _Histogram:
    """Counts values by bucket since the process began."""

    def __init__(self) -> None:
        self._counts = [0] * len(BOUNDS)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(BUCKETS_MS, value)] += 1
        self._sum += value

    def levels(self, name: str, tags: Tags) -> dict[Series, float]:
        """Return the values of the parts; as in Prometheus a bucket includes all lower ones."""
        levels: dict[Series, float] = {(f"{name}_sum", tags): self._sum}
        levels[f"{name}_count", tags] = sum(self._counts)
        for bound, number in zip(BOUNDS, accumulate(self._counts), strict=True):
            levels[f"{name}_bucket", (*tags, ("le", bound))] = number
        return levels


meter = Meter()


class MemberMetrics:
    """Records every batch; after the first, samples the queue every second on the event loop.

    ``alike`` are the queues of this member in all loaded versions.
    """

    def __init__(
        self, member: str, report: Callable[[], QueueReport], alike: Reports | None = None
    ) -> None:
        self._member, self._report = member, report
        self._alike: Reports = {} if alike is None else alike
        self._watching: asyncio.TimerHandle | None = None
        self._is_closed = False

    def executed(self, batch: ExecutedBatch) -> None:
        if not meter.is_on:
            return
        if batch.error is not None:
            meter.count(table.FAILED_BATCHES, member=self._member)
            return
        size = batch.size
        meter.count(table.BATCHES, member=self._member, size=str(size))
        meter.count(table.MEMBER_IMAGES, by=size, member=self._member)
        if self._watching is None and not self._is_closed:
            self._watch()

    def close(self) -> None:
        """Stop sampling; the queue has been closed with its waiting calls."""
        self._is_closed = True
        if self._watching is not None:
            self._watching.cancel()
            self._alike.pop(self, None)
            self._record()

    def _watch(self) -> None:
        self._alike[self] = self._report()
        self._record()
        self._watching = asyncio.get_running_loop().call_later(QUEUE_EVERY_S, self._watch)

    def _record(self) -> None:
        reports = self._alike.values()
        oldest_s = max((report.oldest_age_s for report in reports), default=0.0)
        num_waiting = sum(report.num_waiting for report in reports)
        meter.set(table.QUEUE_LENGTH, num_waiting, member=self._member)
        meter.set(table.QUEUE_AGE_MS, oldest_s * 1e3, member=self._member)


def recorded_golden_ms(member: str, check: Callable[[], None]) -> float:
    """Run a member's golden check, record whether it passed, and return its ms.

    A failure is sent to Ray before the error is raised, since it ends the replica: Ray exports what
    it has when the process ends.
    """
    started = time.perf_counter()
    try:
        check()
    except Exception:
        meter.set(table.GOLDEN_PASSED, 0, member=member)
        meter.count(table.FAILED_GOLDEN_CHECKS, member=member)
        meter.flush()
        raise
    meter.set(table.GOLDEN_PASSED, 1, member=member)
    taken_ms = (time.perf_counter() - started) * 1e3
    meter.set(table.GOLDEN_MS, taken_ms, member=member)
    return taken_ms


def record_answered(route: str, status: int, duration_ms: float) -> None:
    """Count a request over HTTP or gRPC; gRPC requests get the corresponding HTTP status."""
    operation = "classify" if route in CLASSIFY else "other"
    meter.count(table.REQUESTS, route=route, status=str(status), operation=operation)
    if route in CLASSIFY:
        meter.observe(table.REQUEST_MS, duration_ms, status=str(status))


def record_key(name: str, figure: str, by: float) -> None:
    """Count what became of a request with a key, or what it used (app.access.KeyFigures)."""
    if figure in RESULTS:
        meter.count(table.KEY_REQUESTS, by, key=name, result=figure)
    else:
        meter.count(table.KEY_IMAGES if figure == "images" else table.KEY_CPU_MS, by, key=name)


def record_answers(
    answers: Sequence[Classified], entropy: float, durations: Iterable[StageDuration]
) -> None:
    """Record the images of a request; ``entropy`` is the sum over its images, 0..1 each."""
    meter.observe_all(table.STAGE_MS, durations)
    for answer in answers:
        agreed = "yes" if answer.agreement else "no"
        agreed = "alone" if len(answer.members) == 1 else agreed
        degraded, sure = "yes" if answer.degraded else "no", SURE[answer.sure]
        version = answer.model_version
        meter.count(
            table.ANSWERS, agreed=agreed, degraded=degraded, sure=sure, model_version=version
        )
        asked = str(len(answer.asked or answer.members))
        meter.count(table.PLAN_STEPS, plan=answer.plan, asked=asked, reason=answer.reason or "none")
        for member in answer.skipped_members or ():
            meter.count(table.SKIPPED, member=member)
    meter.count(table.ENTROPY, by=entropy)


def record_stage(tags: Tags, duration_ms: float) -> None:
    """Record the duration of a stage of a request or of an image."""
    meter.observe_all(table.STAGE_MS, [(tags, duration_ms)])


@cache
def stage_tags(stage: str, member: str | None) -> Tags:
    """Return the tags of a stage, and of its member if it has one."""
    return ("stage", stage), ("member", member or "none")


def record_lookups(images: Mapping[str, int]) -> None:
    """Count a request's images by the result of the look-up."""
    for result, number in images.items():
        meter.count(table.CACHE_LOOKUPS, number, result=result)


def record_redis(result: str, number: int) -> None:
    """Count images by the result of reading them from Redis or writing them there."""
    meter.count(table.CACHE_REDIS, number, result=result)


def record_state(num_bytes: int, num_evicted: int) -> None:
    """Record a cache's size, and the images that it evicted since the last call."""
    meter.set(table.CACHE_BYTES, num_bytes)
    meter.count(table.CACHE_EVICTIONS, num_evicted)


@dataclass(slots=True)
class Interval:
    """Start and end, in ms since the request's arrival."""

    start_ms: float = 0.0
    end_ms: float = 0.0

    def centred(self, duration_ms: float) -> float:
        """Return the start of a duration that is centred in this interval."""
        return self.start_ms + max(0.0, self.end_ms - self.start_ms - duration_ms) / 2


class RequestObserver:
    """Measures a request from its arrival on; all its stages use this clock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._arrived = clock()
        self._parent = current_parent()
        self._stages: dict[str, Interval] = {}  # stages of the whole request, by name
        self._durations: list[StageDuration] = []  # to be recorded as metrics
        self._answers: list[Classified] = []
        self._entropy = 0.0  # summed over the answers
        self._is_over = False

    def __reduce__(self) -> tuple[type["RequestObserver"], tuple[()]]:
        return RequestObserver, ()  # another process gets a new observer, with its own clock

    def elapsed_s(self) -> float:
        return self._clock() - self._arrived

    def elapsed_ms(self) -> float:
        return (self._clock() - self._arrived) * 1e3

    def stage_ended(
        self, name: str, start_ms: float, attributes: Mapping[str, Value] | None = None
    ) -> None:
        """Record metric and span of a stage of the whole request that ends now.

        ``start_ms`` is what :meth:`elapsed_ms` was at its start.
        """
        interval = self.timed(name, start_ms)
        self._note(name, None, interval.end_ms - start_ms)
        if self._parent is not None:
            start = self._arrived
            started, ended = start + start_ms / 1e3, start + interval.end_ms / 1e3
            record(name, self._parent, started, ended, attributes)

    def timed(self, name: str, start_ms: float) -> Interval:
        """Add a stage that ends now to the timings, without metric and span."""
        interval = self._stages[name] = Interval(start_ms, self.elapsed_ms())
        return interval

    def timings_of_image(
        self,
        row: int,
        decode_ms: float,
        call_times: Mapping[str, Interval],
        answers: Mapping[str, MemberAnswer],
    ) -> Timings:
        """Return the timings of one image, the ``row``-th of the members' answers."""
        stages: list[StageTiming] = []
        self._add_bar(stages, "read")
        self._add_bar(stages, "cache")
        self._note("decode", None, decode_ms)
        stages.append(_bar("decode", self._stages["decode"].centred(decode_ms), decode_ms))
        self._add_bar(stages, "preprocess")
        for name, answer in answers.items():
            queue_ms, infer_ms = answer.queue_ms[row], answer.infer_ms[row]
            start = call_times[name].centred(queue_ms + infer_ms)
            self._note("queue", name, queue_ms)
            self._note("infer", name, infer_ms)
            size = answer.batch_size[row]
            stages.append(_bar("queue", start, queue_ms, name))
            stages.append(_bar("infer", start + queue_ms, infer_ms, name, size))
        self._add_bar(stages, "combine")
        return Timings(round(self.elapsed_ms(), 3), stages)

    def timings_of_cached(self, caching: Interval) -> Timings:
        """Return the timings of an image that was answered from the cache."""
        stages: list[StageTiming] = []
        self._add_bar(stages, "read")
        stages.append(_bar("cache", caching.start_ms, caching.end_ms - caching.start_ms))
        return Timings(round(self.elapsed_ms(), 3), stages)

    def classified(self, answer: Classified, entropy: float) -> None:
        """Count an image's answer, with its normalised entropy, 0..1."""
        self._answers.append(answer)
        self._entropy += entropy

    def answered(self) -> None:
        """Record the metrics of the request, once all of its images have an answer."""
        self._is_over = True
        if self._answers:
            if self._parent is not None:
                first = self._answers[0]
                num_asked = len(first.asked or first.members)
                name_answerers(first.model_version, first.plan, num_asked)
            record_answers(self._answers, self._entropy, self._durations)

    def _add_bar(self, stages: list[StageTiming], name: str) -> None:
        """Append the bar of a stage of the whole request, if it had that stage."""
        if (interval := self._stages.get(name)) is not None:
            start_ms = interval.start_ms
            stages.append(_bar(name, start_ms, interval.end_ms - start_ms))

    def _note(self, stage: str, member: str | None, duration_ms: float) -> None:
        tags = stage_tags(stage, member)
        if self._is_over:  # the metrics are recorded already; this is rendering
            record_stage(tags, duration_ms)
        else:
            self._durations.append((tags, duration_ms))


def _bar(
    stage: str,
    start_ms: float,
    duration_ms: float,
    member: str | None = None,
    batch_size: int | None = None,
) -> StageTiming:
    return StageTiming(stage, round(start_ms, 3), round(duration_ms, 3), member, batch_size)
