"""A classification request as the graph sees it, whichever interface it came through."""

from dataclasses import dataclass
from typing import NamedTuple

from app.caching.response_cache import CacheUse
from app.graph.timeline import Timeline
from app.messages import Fault
from app.queueing.priority import Lane
from app.responses import Classified
from models.runtime import Pixels

RequestAnswers = list[Classified | Fault]  # one per file, in order


@dataclass(frozen=True, slots=True)
class TensorRequest:
    """What a request of tensors asks for; its answers carry every class's probability.

    See :class:`app.graph.probabilities.ClassifiedWithProbabilities`.
    """

    pixels: Pixels | None = None  # (N, H, W, 3) uint8 BGR, decoded already, in place of files
    member: str | None = None  # this one alone is asked; None: the ensemble

    @property
    def is_of_files(self) -> bool:
        """Whether it asks the ensemble for files, as other requests do."""
        return self.pixels is None and self.member is None


class ClassifyRequest(NamedTuple):
    """The files of a request, how they are to be answered, and its clock."""

    files: list[bytes]
    top_k: int
    timeout_s: float  # from its arrival, reading it included
    request_id: str
    timeline: Timeline
    lane: Lane = "interactive"
    may_skip: bool = True  # the cascade, if there is one, may leave members out
    is_probe: bool = False  # the service's own, nobody's photo: metrics and cache leave it out
    tensors: TensorRequest | None = None
    cache_use: CacheUse = "use"
    threshold: float | None = None  # of a multi-label set's scores; None: the set's own

    @property
    def num_images(self) -> int:
        """How many answers the request has."""
        return num_images_of(self.files, self.tensors)

    @property
    def left_s(self) -> float:
        """How much of its time is left."""
        return self.timeout_s - self.timeline.elapsed_s()


@dataclass(frozen=True, slots=True)
class ForwardedRequest:
    """A request as one Gateway hands it to another, in the middle of a rolling update."""

    files: list[bytes]
    top_k: int
    left_s: float
    request_id: str
    lane: Lane
    tensors: TensorRequest | None = None
    cache_use: CacheUse = "use"
    threshold: float | None = None

    @classmethod
    def of(cls, request: ClassifyRequest) -> "ForwardedRequest":
        """Return what the other Gateway needs; its clock starts anew, with the time left."""
        return cls(
            request.files,
            request.top_k,
            request.left_s,
            request.request_id,
            request.lane,
            request.tensors,
            request.cache_use,
            request.threshold,
        )

    def request(self) -> ClassifyRequest:
        """Return the request anew, with a timeline of this process."""
        return ClassifyRequest(
            self.files,
            self.top_k,
            self.left_s,
            self.request_id,
            Timeline(),
            self.lane,
            tensors=self.tensors,
            cache_use=self.cache_use,
            threshold=self.threshold,
        )


def num_images_of(files: list[bytes], tensors: TensorRequest | None) -> int:
    """Return how many images there are, encoded or decoded."""
    if tensors is None or tensors.pixels is None:
        return len(files)
    return len(tensors.pixels)
