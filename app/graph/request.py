"""A classification request as the graph takes it, from either interface."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from app.caching.response_cache import CacheUse
from app.graph.observer import RequestObserver
from app.messages import Fault
from app.queueing.priority import Lane
from app.responses import Classified
from models.runtime import Pixels

RequestAnswers = list[Classified | Fault]  # one per file, in order


@dataclass(frozen=True, slots=True)
class TensorRequest:
    """The part of a request of tensors: its answers carry every class's probability."""

    pixels: Pixels | None = None  # (N, H, W, 3) uint8 BGR, decoded already, in place of files
    member: str | None = None  # ask this member alone; None: the ensemble
    version: str | None = None  # the fingerprint of the version that must answer; None: any
    classes_of: str | None = None  # the fingerprint whose order of classes rows have; None: own


class RequestOptions(NamedTuple):
    """The options in a request's headers and query; None for an option that is not there."""

    request_id: str
    top_k: int | None = None
    timeout_s: float | None = None  # can only shorten the settings' time limit
    priority: str | None = None  # the Priority header (RFC 9218)
    refused_before: str | None = None  # HAProxy's header: how many requests it refused itself
    cache_control: str | None = None  # the header, for a cache if there is one
    threshold: float | None = None  # of a multi-label set's scores
    model_set: str | None = None  # by name; None: the first that is served
    traffic_key: str | None = None  # the value of the setting traffic_header's header


class RequestBody(NamedTuple):
    """The content of a request's body: the images, and options that override the headers'."""

    files: list[bytes]
    top_k: int | None = None
    timeout_s: float | None = None  # from the request's arrival; can only shorten the limit
    priority: str | None = None
    tensors: "TensorRequest | None" = None
    threshold: float | None = None
    model_set: str | None = None  # for interfaces whose options cannot name it

    def options(self, options: RequestOptions) -> RequestOptions:
        """Return ``options`` with those of the body in their place; unchanged if it has none."""
        if self[1:4] == (None, None, None) and self.threshold is None:
            return options
        own = self._asdict()
        names = ("top_k", "timeout_s", "priority", "threshold")
        return options._replace(**{name: own[name] for name in names if own[name] is not None})


class AnswerListener(Protocol):
    """Is notified of answers, and must not delay them."""

    def note(
        self, request_id: str, files: Sequence[bytes], answers: Sequence[Classified | Fault]
    ) -> None:
        """Record a request's files and their answers, in order."""


class ClassifyRequest(NamedTuple):
    """The files of a request, the options for its answers, and its clock."""

    files: list[bytes]
    top_k: int
    timeout_s: float  # from its arrival, the upload included
    request_id: str
    observer: RequestObserver
    lane: Lane = "interactive"
    may_skip: bool = True  # whether a cascade may skip members
    is_probe: bool = False  # a probe of the service itself: not in metrics, nor in the cache
    tensors: TensorRequest | None = None
    cache_use: CacheUse = "use"
    threshold: float | None = None  # of a multi-label set's scores; None: the set's own
    traffic_key: str | None = None  # the caller's, if a header chooses the version

    @property
    def num_images(self) -> int:
        """How many answers the request has."""
        if self.tensors is None or self.tensors.pixels is None:
            return len(self.files)
        return len(self.tensors.pixels)

    @property
    def is_of_files(self) -> bool:
        """Whether files go to the whole ensemble; a request of pixels has no files."""
        return bool(self.files) and (self.tensors is None or self.tensors.member is None)

    @property
    def left_s(self) -> float:
        """The time that is left, in s; negative once it is over."""
        return self.timeout_s - self.observer.elapsed_s()

    def forwarded(self) -> "ClassifyRequest":
        """Return a copy for another Gateway, whose time limit is the time that is left."""
        return self._replace(timeout_s=self.left_s, observer=RequestObserver())
