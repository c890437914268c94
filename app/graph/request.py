"""A classification request as the graph sees it, whichever interface it came through."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from app.caching.response_cache import CacheUse
from app.graph.observer import RequestObserver
from app.messages import Fault
from app.queueing.byte_budget import Share
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


class RequestOptions(NamedTuple):
    """What a client asks for in a request's headers and query; None: nothing said."""

    request_id: str
    top_k: int | None = None
    timeout_s: float | None = None  # can only shorten the settings'
    priority: str | None = None  # the Priority header (RFC 9218)
    refused_before: str | None = None  # HAProxy's header: how many it has refused by itself
    cache_control: str | None = None  # the header, where there is a cache
    threshold: float | None = None  # of a multi-label set's scores


class RequestBody(NamedTuple):
    """What a request's body holds: the images, and what it asks for in place of the options."""

    files: list[bytes]
    top_k: int | None = None
    timeout_s: float | None = None  # from the request's arrival; can only shorten it
    priority: str | None = None
    tensors: "TensorRequest | None" = None
    threshold: float | None = None

    def options(self, options: RequestOptions) -> RequestOptions:
        """Return the options with what the body asks for."""
        own = self._asdict()
        names = ("top_k", "timeout_s", "priority", "threshold")
        return options._replace(**{name: own[name] for name in names if own[name] is not None})


class BodyReader(Protocol):
    """Reads a request's body under its interface's limits, once the request is admitted."""

    async def read(self, share: Share) -> RequestBody:
        """Return the body, or raise a TandemError; what arrives counts in ``share``."""


class ClassifyRequest(NamedTuple):
    """The files of a request, how they are to be answered, and its clock."""

    files: list[bytes]
    top_k: int
    timeout_s: float  # from its arrival, reading it included
    request_id: str
    observer: RequestObserver
    lane: Lane = "interactive"
    may_skip: bool = True  # the cascade, if there is one, may leave members out
    is_probe: bool = False  # the service's own, nobody's photo: metrics and cache leave it out
    tensors: TensorRequest | None = None
    cache_use: CacheUse = "use"
    threshold: float | None = None  # of a multi-label set's scores; None: the set's own

    @property
    def num_images(self) -> int:
        """How many answers the request has."""
        if self.tensors is None or self.tensors.pixels is None:
            return len(self.files)
        return len(self.tensors.pixels)

    @property
    def left_s(self) -> float:
        """How much of its time is left."""
        return self.timeout_s - self.observer.elapsed_s()

    def forwarded(self) -> "ClassifyRequest":
        """Return it for another Gateway; its clock starts anew, with the time that is left."""
        return self._replace(timeout_s=self.left_s, observer=RequestObserver())
