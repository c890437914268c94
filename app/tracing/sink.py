"""A bounded buffer of spans before an exporter: the SDK's, with a count of lost spans."""

import logging
import threading
from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from app.queueing.circuit_breaker import CircuitBreaker
from app.tracing.exporters import Endpoint

logger = logging.getLogger("ray.serve")
MAX_WAITING = 8192  # spans; about 10 MB
BATCH = 512
EVERY_MS = 1000.0
ENDPOINT_TRIAL_EVERY_S = 10.0  # after a failure


class Sink:
    """Passes spans to an exporter on a thread of the SDK; counts those that fail or do not fit."""

    def __init__(
        self,
        name: str,
        exporter: SpanExporter,
        endpoint: Endpoint | None = None,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self.name = name
        self._exporter = CountedExporter(name, exporter, endpoint)
        self._max_waiting = max_waiting
        self._processor = BatchSpanProcessor(
            self._exporter,
            max_queue_size=max_waiting,
            schedule_delay_millis=EVERY_MS,
            max_export_batch_size=min(BATCH, max_waiting),
        )
        self._counting = threading.Lock()
        self._num_taken = self._num_refused = 0

    @property
    def num_dropped(self) -> int:
        return self._num_refused + self._exporter.num_failed

    def on_end(self, span: ReadableSpan) -> None:
        """Queue a span that has ended, or count it as dropped; never waits."""
        with self._counting:
            # The SDK would drop the oldest span without counting it.
            if self._num_taken - self._exporter.num_done >= self._max_waiting:
                self._num_refused += 1
                return
            self._num_taken += 1
        self._processor.on_end(span)

    def shutdown(self) -> None:
        """Send the remaining spans, unless earlier exports failed."""
        if self._exporter.is_failing:
            self._exporter.shutdown()  # ends a pending retry
        self._processor.shutdown()  # type: ignore[no-untyped-call]

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._processor.force_flush(timeout_millis)


class CountedExporter(SpanExporter):
    """Wraps an exporter; never raises, and warns when failures begin and end.

    Attributes:
        num_done: spans that were exported or given up.
        num_failed: those given up.

    """

    def __init__(self, name: str, exporter: SpanExporter, endpoint: Endpoint | None) -> None:
        self._name, self._exporter, self._endpoint = name, exporter, endpoint
        self.num_done = self.num_failed = 0
        self._is_shut_down = False
        self._breaker = CircuitBreaker(ENDPOINT_TRIAL_EVERY_S, ENDPOINT_TRIAL_EVERY_S)

    @property
    def is_failing(self) -> bool:
        """Whether the last export failed."""
        return self._breaker.is_open

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export, and count failed spans; an exporter that failed is left alone for a while."""
        is_tried, result, reason = self._breaker.allows(), SpanExportResult.FAILURE, "not taken"
        if is_tried:
            result, reason = self._tried(spans)
        has_failed = result is not SpanExportResult.SUCCESS
        self.num_done += len(spans)
        self.num_failed += len(spans) if has_failed else 0
        if is_tried:
            self._log(failed=has_failed, reason=reason)
        return result

    def _tried(self, spans: Sequence[ReadableSpan]) -> tuple[SpanExportResult, str]:
        """Export; return the result and, for a failure, its reason."""
        endpoint = self._endpoint
        try:
            result = self._exporter.export(spans)
        except Exception as error:
            return SpanExportResult.FAILURE, f"{type(error).__name__}: {error}"
        if result is SpanExportResult.SUCCESS or endpoint is None:
            return result, "not taken"
        return result, endpoint.problem() or f"{endpoint.host}:{endpoint.port} refuses them"

    def shutdown(self) -> None:
        if not self._is_shut_down:
            self._is_shut_down = True
            self._exporter.shutdown()

    def _log(self, *, failed: bool, reason: str) -> None:
        """Log when failures begin, and when they end."""
        if failed and self._breaker.failed():
            logger.warning(
                "%s spans are lost (%s); requests are served as before, ray_tandem_dropped_spans "
                "counts them. Set trace_endpoint, start who listens there, or set "
                "trace_exporter: none",
                self._name,
                reason,
            )
        elif not failed and self._breaker.succeeded():
            logger.warning("%s spans arrive; %d were lost", self._name, self.num_failed)
