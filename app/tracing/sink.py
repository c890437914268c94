"""A bounded buffer of spans in front of one exporter, sent by a thread of its own."""

import logging
import threading
from collections import deque
from collections.abc import Sequence

from opentelemetry.context import attach, set_value
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from app.queueing.circuit_breaker import CircuitBreaker
from app.tracing.local_spans import LocalSpans, Queued

logger = logging.getLogger("ray.serve")
MAX_WAITING = 8192  # spans; about 10 MB
BATCH = 512
EVERY_S = 1.0
SHUTDOWN_S = 30.0
ENDPOINT_TRIAL_EVERY_S = 10.0  # of one that fails


class Sink:
    """Hands spans to an exporter on a thread of its own; counts what fails or does not fit.

    It is the SDK's BatchSpanProcessor in what it does, but a span that finds ``max_waiting`` others
    is counted, and to take one costs little: a request has ten of them, for each exporter.
    """

    def __init__(self, name: str, exporter: SpanExporter, max_waiting: int = MAX_WAITING) -> None:
        self.name = name
        self._counted = _Counted(name, exporter)
        self._max_waiting = max_waiting
        self._waiting: deque[Queued] = deque()
        self._num_waiting = 0  # spans, those that are being exported too
        self._counting = threading.Lock()
        self._num_refused = 0
        self._is_over = False
        self._exporting, self._awake = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"spans-{name}", daemon=True)
        self._thread.start()

    @property
    def num_dropped(self) -> int:
        """How many spans never arrived."""
        return self._num_refused + self._counted.num_failed

    def on_end(self, ended: Queued) -> None:
        """Queue what has ended, a span or a request's, or count it as dropped; never waits."""
        num = 1 if isinstance(ended, ReadableSpan) else ended.num_spans
        with self._counting:
            before = self._num_waiting
            if before >= self._max_waiting:
                self._num_refused += num
                return
            self._num_waiting = before + num
            self._waiting.append(ended)
        if before <= BATCH < before + num:
            self._awake.set()

    def shutdown(self) -> None:
        """Send what is left, unless nothing could be sent before."""
        if self._counted.is_failing:
            self._counted.shutdown()  # ends a retry that waits
        self._is_over = True
        self._awake.set()
        self._thread.join(SHUTDOWN_S)
        self._counted.shutdown()

    def force_flush(self, timeout_millis: int) -> bool:
        """Send what waits; False if others still send after ``timeout_millis``."""
        return self._export_waiting(timeout_millis / 1e3)

    def _run(self) -> None:
        # What an exporter itself calls is nobody's request; the key is OpenTelemetry's.
        attach(set_value("suppress_instrumentation", True))
        while not self._is_over:
            self._awake.wait(EVERY_S)
            self._awake.clear()
            self._export_waiting()
        self._export_waiting()  # what came while the last was sent

    def _export_waiting(self, timeout_s: float = -1) -> bool:
        if not self._exporting.acquire(timeout=timeout_s):
            return False
        try:
            while batch := self._next_batch():
                self._counted.export(batch)
                with self._counting:
                    self._num_waiting -= num_spans_of(batch)
        finally:
            self._exporting.release()
        return True

    def _next_batch(self) -> list[Queued]:
        """Take what waits longest, ``BATCH`` spans of it or as many as its last request has."""
        batch: list[Queued] = []
        num = 0
        while self._waiting and num < BATCH:
            batch.append(self._waiting.popleft())
            num += num_spans_of(batch[-1:])
        return batch


def num_spans_of(queued: Sequence[Queued]) -> int:
    """Return how many spans there are."""
    return sum(1 if isinstance(one, ReadableSpan) else one.num_spans for one in queued)


class _Counted:
    """An exporter that never raises; one warning when it begins to fail, one when it ends."""

    def __init__(self, name: str, exporter: SpanExporter) -> None:
        self._name, self._exporter = name, exporter
        self.num_done = self.num_failed = 0
        self._is_shut_down = False
        self._breaker = CircuitBreaker(ENDPOINT_TRIAL_EVERY_S, ENDPOINT_TRIAL_EVERY_S)

    @property
    def is_failing(self) -> bool:
        """Whether the last export that was tried failed."""
        return self._breaker.is_open

    def export(self, queued: Sequence[Queued]) -> None:
        """Export, and count what failed.

        Once an endpoint has failed one request's spans are sent first: to encode a whole batch
        every few seconds for nobody costs as much as all that is written to files.
        """
        num_left, why = num_spans_of(queued), "not taken"
        self.num_done += num_left
        if is_tried := self._breaker.allows():  # encoding for nobody costs CPU time
            first = queued[:1] if self.is_failing else queued
            for part in (first, queued[len(first) :]):
                if part:
                    result, why = self._tried(part)
                    if result is not SpanExportResult.SUCCESS:
                        break
                    num_left -= num_spans_of(part)
        self.num_failed += num_left
        if is_tried:
            self._tell(failed=num_left > 0, why=why)

    def _tried(self, queued: Sequence[Queued]) -> tuple[SpanExportResult, str]:
        try:
            return self._export(queued), "not taken"
        except Exception as error:
            return SpanExportResult.FAILURE, f"{type(error).__name__}: {error}"

    def _export(self, queued: Sequence[Queued]) -> SpanExportResult:
        if isinstance(self._exporter, LocalSpans):  # which needs nothing of the SDK's made
            return self._exporter.export(queued)
        return self._exporter.export([span for one in queued for span in made_of(one)])

    def _tell(self, *, failed: bool, why: str) -> None:
        if failed and self._breaker.failed():
            logger.warning(
                "%s spans are lost (%s); requests are served as before, tandem_dropped_spans "
                "counts what is lost. Set trace_endpoint, start who listens there, or set "
                "trace_exporter: file",
                self._name,
                why,
            )
        elif not failed and self._breaker.succeeded():
            logger.warning("%s spans arrive again; %d were lost", self._name, self.num_failed)

    def shutdown(self) -> None:
        if not self._is_shut_down:
            self._is_shut_down = True
            self._exporter.shutdown()


def made_of(queued: Queued) -> list[ReadableSpan]:
    """Return what the SDK's exporters take."""
    if isinstance(queued, ReadableSpan):
        return [queued]
    return [span.made() for span in queued.spans()]
