"""A request's timeline: start and duration of every stage, as the Gateway's clock sees them.

Only durations come from other processes, so nodes need no common clock: what a member reports is
placed in the middle of the call that the Gateway timed, the rest being transport.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from app.messages import MemberAnswer
from app.metrics.responses import observe_stage
from app.responses import StageTiming, Timings
from app.tracing.spans import current_parent, record


@dataclass
class Interval:
    """Start and end in ms from the request's arrival."""

    start_ms: float = 0.0
    end_ms: float = 0.0

    def centred(self, duration_ms: float) -> float:
        """Return the start that puts ``duration_ms`` into the middle of this span."""
        return self.start_ms + max(0.0, self.end_ms - self.start_ms - duration_ms) / 2


class Timeline:
    """The clock of one request; made when it arrives."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = clock()
        self._parent = current_parent()
        self.reading = Interval()
        self.combining = Interval()

    def elapsed_s(self) -> float:
        """Seconds since the request arrived."""
        return self._clock() - self._started

    @contextmanager
    def measure(self, name: str | None = None) -> Iterator[Interval]:
        """Time a block; the span's end is set when the block is left.

        A block with a name is a span of the request's trace too, if it has one.
        """
        span = Interval(start_ms=self.elapsed_s() * 1e3)
        try:
            yield span
        finally:
            span.end_ms = self.elapsed_s() * 1e3
            if name is not None and self._parent is not None:
                start = self._started
                record(name, self._parent, start + span.start_ms / 1e3, start + span.end_ms / 1e3)

    @contextmanager
    def encoding(self) -> Iterator[None]:
        """Time the rendering of the answer, which its own timings cannot contain."""
        with self.measure("encode") as interval:
            yield
        observe_stage("encode", interval.end_ms - interval.start_ms)

    def of_image(
        self,
        row: int,
        decoding: Interval,
        decode_ms: float,
        call_times: Mapping[str, Interval],
        answers: Mapping[str, MemberAnswer],
    ) -> Timings:
        """Return the stages of one image, the ``row``-th of what the members answered."""
        stages = [
            _stage("read", self.reading.start_ms, self.reading.end_ms - self.reading.start_ms),
            _stage("decode", decoding.centred(decode_ms), decode_ms),
        ]
        for name, answer in answers.items():
            queue_ms, infer_ms = answer.queue_ms[row], answer.infer_ms[row]
            start = call_times[name].centred(queue_ms + infer_ms)
            size = answer.batch_size[row]
            stages.append(_stage("queue", start, queue_ms, name))
            stages.append(_stage("infer", start + queue_ms, infer_ms, name, size))
        combine_ms = self.combining.end_ms - self.combining.start_ms
        stages.append(_stage("combine", self.combining.start_ms, combine_ms))
        return Timings(total=round(self.elapsed_s() * 1e3, 3), stages=stages)


def _stage(
    stage: str,
    start_ms: float,
    duration_ms: float,
    member: str | None = None,
    batch_size: int | None = None,
) -> StageTiming:
    return StageTiming(
        stage=stage,
        member=member,
        start_ms=round(start_ms, 3),
        duration_ms=round(duration_ms, 3),
        batch_size=batch_size,
    )
