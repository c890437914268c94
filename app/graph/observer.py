"""The observer of a request: records its timings, spans and metrics.

Other processes report durations only, so that nodes need no common clock. The time that a member
reports is placed in the middle of the call that the Gateway timed; the rest is transport.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from app.messages import MemberAnswer
from app.metrics.requests import StageDuration, record_answers, record_stage
from app.responses import Classified, StageTiming, Timings
from app.tracing.parents import current_parent, name_version
from app.tracing.spans import Value, record


@dataclass(slots=True)
class Interval:
    """Start and end, in ms since the request's arrival."""

    start_ms: float = 0.0
    end_ms: float = 0.0

    @property
    def duration_ms(self) -> float:
        return self.end_ms - self.start_ms

    def centred(self, duration_ms: float) -> float:
        """Return the start of a duration that is centred in this interval."""
        return self.start_ms + max(0.0, self.duration_ms - duration_ms) / 2


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
        return self.elapsed_s() * 1e3

    @contextmanager
    def stage(self, name: str, *, is_recorded: bool = True) -> Iterator[Interval]:
        """Time a block; record its metric, and its span if the request is traced."""
        interval = Interval(self.elapsed_ms())
        try:
            yield interval
        finally:
            interval.end_ms = self.elapsed_ms()
            if is_recorded:
                self.stage_ended(name, interval)
            else:
                self._stages[name] = interval

    def stage_ended(
        self, name: str, interval: Interval, attributes: Mapping[str, Value] | None = None
    ) -> None:
        """Record the time and span of a stage of the whole request."""
        self._stages[name] = interval
        self._note(name, None, interval.duration_ms)
        if self._parent is not None:
            start = self._arrived
            started, ended = start + interval.start_ms / 1e3, start + interval.end_ms / 1e3
            record(name, self._parent, started, ended, attributes)

    def timings_of_image(
        self,
        row: int,
        decode_ms: float,
        call_times: Mapping[str, Interval],
        answers: Mapping[str, MemberAnswer],
    ) -> Timings:
        """Return the timings of one image, the ``row``-th of the members' answers."""
        stages = self._bars("read", "cache")
        self._note("decode", None, decode_ms)
        stages.append(_bar("decode", self._stages["decode"].centred(decode_ms), decode_ms))
        stages += self._bars("preprocess")
        for name, answer in answers.items():
            queue_ms, infer_ms = answer.queue_ms[row], answer.infer_ms[row]
            start = call_times[name].centred(queue_ms + infer_ms)
            self._note("queue", name, queue_ms)
            self._note("infer", name, infer_ms)
            size = answer.batch_size[row]
            stages.append(_bar("queue", start, queue_ms, name))
            stages.append(_bar("infer", start + queue_ms, infer_ms, name, size))
        stages += self._bars("combine")
        return self._timings(stages)

    def timings_of_cached(self, caching: Interval) -> Timings:
        """Return the timings of an image that was answered from the cache."""
        cache = _bar("cache", caching.start_ms, caching.duration_ms)
        return self._timings([*self._bars("read"), cache])

    def classified(self, answer: Classified, entropy: float) -> None:
        """Count an image's answer, with its normalised entropy, 0..1."""
        self._answers.append(answer)
        self._entropy += entropy

    def answered(self) -> None:
        """Record the metrics of the request, once all of its images have an answer."""
        self._is_over = True
        if self._answers:
            if self._parent is not None:
                name_version(self._answers[0].model_version)
            record_answers(self._answers, self._entropy, self._durations)

    def _bars(self, *names: str) -> list[StageTiming]:
        intervals = ((name, self._stages.get(name)) for name in names)
        return [_bar(n, i.start_ms, i.duration_ms) for n, i in intervals if i is not None]

    def _timings(self, stages: list[StageTiming]) -> Timings:
        return Timings(total=round(self.elapsed_ms(), 3), stages=stages)

    def _note(self, stage: str, member: str | None, duration_ms: float) -> None:
        if self._is_over:  # the metrics are recorded already; this is rendering
            record_stage(stage, member, duration_ms)
        else:
            self._durations.append((stage, member, duration_ms))


def _bar(
    stage: str,
    start_ms: float,
    duration_ms: float,
    member: str | None = None,
    batch_size: int | None = None,
) -> StageTiming:
    return StageTiming(stage, round(start_ms, 3), round(duration_ms, 3), member, batch_size)
