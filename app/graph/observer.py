"""The observer of a request: records its timings, spans and metrics.

Other processes report durations only, so that nodes need no common clock. The time that a member
reports is placed in the middle of the call that the Gateway timed; the rest is transport.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from app.answers import Classified, MemberAnswer, StageTiming, Timings
from app.telemetry.metrics import StageDuration, record_answers, record_stage, stage_tags
from app.telemetry.spans import Value, current_parent, name_answerers, record


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
