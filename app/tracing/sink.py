"""A bounded buffer of spans in front of one exporter, sent by a thread of its own."""

import logging
import threading
import time
from collections.abc import Sequence

from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from app.tracing.local_spans import AnySpan, LocalSpans
from app.tracing.spans import RecordedSpan

logger = logging.getLogger("ray.serve")
MAX_WAITING = 8192  # spans; about 10 MB
BATCH = 512
EVERY_MS = 1000.0
RETRY_AFTER_S = 10.0  # after a failure


class Sink:
    """The SDK's batching in front of an exporter; counts what fails or does not fit.

    The SDK's processor drops its oldest span when it is full, with a warning for each and no count;
    here a span that finds ``max_waiting`` others is counted and not handed on.
    """

    def __init__(self, name: str, exporter: SpanExporter, max_waiting: int = MAX_WAITING) -> None:
        self.name = name
        self._counted = _Counted(name, exporter)
        self._max_waiting, self._num_taken, self._num_refused = max_waiting, 0, 0
        self._processor = BatchSpanProcessor(
            self._counted, max_waiting, EVERY_MS, min(BATCH, max_waiting)
        )
        self._lock = threading.Lock()

    @property
    def num_dropped(self) -> int:
        """How many spans never arrived."""
        return self._num_refused + self._counted.num_failed

    def on_end(self, span: AnySpan) -> None:
        """Queue a span, or count it as dropped; never waits."""
        with self._lock:
            if self._num_taken - self._counted.num_done >= self._max_waiting:
                self._num_refused += 1
                return
            self._num_taken += 1
        self._processor.on_end(span)  # type: ignore[arg-type]  # it asks for no more than a context

    def shutdown(self) -> None:
        """Send what is left, unless nothing could be sent before."""
        if self._counted.is_failing:
            self._counted.shutdown()  # ends a retry that waits
        self._processor.shutdown()  # type: ignore[no-untyped-call]

    def force_flush(self, timeout_millis: int) -> bool:
        """Send what waits."""
        return self._processor.force_flush(timeout_millis)


class _Counted(SpanExporter):
    """An exporter that never raises; one warning when it begins to fail, one when it ends."""

    def __init__(self, name: str, exporter: SpanExporter) -> None:
        self._name, self._exporter = name, exporter
        self.num_done = self.num_failed = 0
        self.is_failing = self._is_shut_down = False
        self._try_again_at = 0.0  # time.monotonic; until then an endpoint that failed is left alone

    def export(self, spans: Sequence[AnySpan]) -> SpanExportResult:
        result, why = SpanExportResult.FAILURE, "not taken"
        if is_tried := time.monotonic() >= self._try_again_at:  # encoding for nobody costs CPU time
            try:
                result = self._export(spans)
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
        failed = result is not SpanExportResult.SUCCESS
        self.num_done += len(spans)
        self.num_failed += len(spans) * failed
        if is_tried:
            self._tell(failed=failed, why=why)
        return result

    def _export(self, spans: Sequence[AnySpan]) -> SpanExportResult:
        if isinstance(self._exporter, LocalSpans):  # which needs nothing of the SDK's made
            return self._exporter.export(spans)
        made = [span.made() if isinstance(span, RecordedSpan) else span for span in spans]
        return self._exporter.export(made)

    def _tell(self, *, failed: bool, why: str) -> None:
        if failed:
            self._try_again_at = time.monotonic() + RETRY_AFTER_S
        if failed and not self.is_failing:
            logger.warning(
                "%s spans are lost (%s); requests are served as before, tandem_dropped_spans "
                "counts what is lost. Set trace_endpoint, start who listens there, or set "
                "trace_exporter: file",
                self._name,
                why,
            )
        elif self.is_failing and not failed:
            logger.warning("%s spans arrive again; %d were lost", self._name, self.num_failed)
        self.is_failing = failed

    def shutdown(self) -> None:
        if not self._is_shut_down:
            self._is_shut_down = True
            self._exporter.shutdown()
