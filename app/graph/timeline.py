"""A request's timeline: start and duration of every stage, as the Gateway's clock sees them.

Only durations come from other processes, so nodes need no common clock: what a member reports is
placed in the middle of the call that the Gateway timed, the rest being transport.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from app.messages import MemberAnswer
from app.metrics.responses import defer_stage
from app.responses import StageTiming, Timings
from app.tracing.parents import current_parent
from app.tracing.spans import Value, record


@dataclass(slots=True)
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
        self.preprocessing: Interval | None = None  # the operator's function, if there is one
        self.caching: Interval | None = None  # the look into the response cache, if there is one

    def elapsed_s(self) -> float:
        """Seconds since the request arrived."""
        return self._clock() - self._started

    def measure(self, name: str | None = None) -> "Measured":
        """Time a block: the context manager gives its interval, whose end is set at the end.

        A block with a name is a span of the request's trace too, if it has one.
        """
        return Measured(self, name)

    def encoding(self) -> "Measured":
        """Time the rendering of the answer, which its own timings cannot contain."""
        return Measured(self, "encode", defer_stage)

    def record(
        self, name: str, interval: Interval, attributes: Mapping[str, Value] | None = None
    ) -> None:
        """Record an interval as a span of the request's trace, if it has one."""
        if self._parent is not None:
            start = self._started
            started, ended = start + interval.start_ms / 1e3, start + interval.end_ms / 1e3
            record(name, self._parent, started, ended, attributes)

    def of_image(
        self,
        row: int,
        decoding: Interval,
        decode_ms: float,
        call_times: Mapping[str, Interval],
        answers: Mapping[str, MemberAnswer],
    ) -> Timings:
        """Return the stages of one image, the ``row``-th of what the members answered."""
        stages = [_whole_bar("read", self.reading)]
        if self.caching is not None:
            stages.append(_whole_bar("cache", self.caching))
        stages.append(_bar("decode", decoding.centred(decode_ms), decode_ms))
        if self.preprocessing is not None:
            stages.append(_whole_bar("preprocess", self.preprocessing))
        for name, answer in answers.items():
            queue_ms, infer_ms = answer.queue_ms[row], answer.infer_ms[row]
            start = call_times[name].centred(queue_ms + infer_ms)
            size = answer.batch_size[row]
            stages.append(_bar("queue", start, queue_ms, name))
            stages.append(_bar("infer", start + queue_ms, infer_ms, name, size))
        stages.append(_whole_bar("combine", self.combining))
        return Timings(total=round(self.elapsed_s() * 1e3, 3), stages=stages)

    def of_cached(self, caching: Interval) -> Timings:
        """Return the stages of an image that nothing was computed for."""
        stages = [_whole_bar("read", self.reading), _whole_bar("cache", caching)]
        return Timings(total=round(self.elapsed_s() * 1e3, 3), stages=stages)


class Measured:
    """A block of code that is timed; a class, which costs less than a generator's context."""

    __slots__ = ("_interval", "_name", "_observe", "_timeline")

    def __init__(
        self,
        timeline: Timeline,
        name: str | None,
        observe: Callable[[str, float], None] | None = None,
    ) -> None:
        self._timeline, self._name, self._observe = timeline, name, observe

    def __enter__(self) -> Interval:
        self._interval = Interval(self._timeline.elapsed_s() * 1e3)
        return self._interval

    def __exit__(self, *_: object) -> None:
        interval = self._interval
        interval.end_ms = self._timeline.elapsed_s() * 1e3
        if self._name is not None:
            self._timeline.record(self._name, interval)
            if self._observe is not None:
                self._observe(self._name, interval.end_ms - interval.start_ms)


def _whole_bar(stage: str, interval: Interval) -> StageTiming:
    return _bar(stage, interval.start_ms, interval.end_ms - interval.start_ms)


def _bar(
    stage: str,
    start_ms: float,
    duration_ms: float,
    member: str | None = None,
    batch_size: int | None = None,
) -> StageTiming:
    return StageTiming(stage, round(start_ms, 3), round(duration_ms, 3), member, batch_size)
