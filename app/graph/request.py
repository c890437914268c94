"""A classification request as the graph sees it, whichever interface it came through."""

from dataclasses import dataclass

from app.graph.timeline import Timeline
from app.queueing.priority import Lane


@dataclass(frozen=True, slots=True)
class ClassifyRequest:
    """The files of a request, how they are to be answered, and its clock."""

    files: list[bytes]
    top_k: int
    timeout_s: float  # from its arrival, reading it included
    request_id: str
    timeline: Timeline
    lane: Lane = "interactive"
    may_skip: bool = True  # the cascade, if there is one, may leave members out
    is_probe: bool = False  # the service's own, nobody's photo: metrics leave it out

    @property
    def left_s(self) -> float:
        """How much of its time is left."""
        return self.timeout_s - self.timeline.elapsed_s()
