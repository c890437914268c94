"""The protocol's documents on server and models, as dataclasses whose schema /docs shows.

The fields have the protocol's names, in JSON and in protobuf messages alike.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from app.answers import Classified

FIRST_VERSION = "1"  # the version number of every model, for clients that require one

# Triton's extensions that are implemented here.
EXTENSIONS = (
    "binary_tensor_data",
    "classification",
    "model_repository",
    "parameters",
    "schedule_policy",
    "statistics",
)
SHARED_MEMORY = "system_shared_memory"  # with the setting shared_memory


@dataclass(slots=True)
class ProtocolError:
    """Every status from 400 up has this body."""

    error: str


@dataclass(slots=True)
class Live:
    """The answer of /v2/health/live."""

    live: bool


@dataclass(slots=True)
class ModelReady:
    """The answer of a model's /ready."""

    name: str
    ready: bool


@dataclass(slots=True)
class ServerMetadata:
    """The answer of /v2."""

    name: str
    version: str
    extensions: list[str]


@dataclass(slots=True)
class TensorMetadata:
    """An input or output; -1 in a shape: of any size."""

    name: str
    datatype: str
    shape: list[int]


@dataclass(slots=True)
class ModelMetadata:
    """A model; of its inputs a request has one."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


@dataclass(slots=True)
class IndexEntry:
    """A model of the repository index."""

    name: str
    version: str
    state: str
    reason: str


@dataclass(slots=True)
class RegionStatus:
    """A registered region of shared memory; sizes in bytes."""

    name: str
    key: str  # the name of its file
    offset: int
    byte_size: int


@dataclass(slots=True)
class Duration:
    """How often, and how long altogether."""

    count: int = 0
    ns: int = 0

    def add(self, ms: float) -> None:
        self.count += 1
        self.ns += int(ms * 1e6)


@dataclass(slots=True)
class InferStatistics:
    """Times of requests, and of their slowest image's stages (decode, queue, infer, combine).

    A request whose images were all in the response cache is a hit; it has no such stages.
    """

    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    queue: Duration = field(default_factory=Duration)
    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)
    cache_hit: Duration = field(default_factory=Duration)
    cache_miss: Duration = field(default_factory=Duration)


@dataclass(slots=True)
class ModelStatistics:
    """Counts of this Gateway's answers by this protocol, since it started."""

    name: str
    version: str
    last_inference: int = 0  # ms since 1970
    inference_count: int = 0  # images
    execution_count: int = 0  # computed requests: a batch may mix several, also of /v1
    inference_stats: InferStatistics = field(default_factory=InferStatistics)
    batch_stats: list[dict[str, Any]] = field(default_factory=list)  # in the service's metrics

    def succeeded(self, took_ms: float, images: Sequence[Classified]) -> None:
        self.last_inference = int(time.time() * 1e3)
        self.inference_count += len(images)
        durations = self.inference_stats
        durations.success.add(took_ms)
        if looking_ms := _slowest(images, "cache"):
            is_hit = all(image.cached for image in images)
            (durations.cache_hit if is_hit else durations.cache_miss).add(looking_ms)
            if is_hit:
                return
        self.execution_count += 1
        durations.compute_input.add(_slowest(images, "decode"))
        durations.queue.add(_slowest(images, "queue"))
        durations.compute_infer.add(_slowest(images, "infer"))
        durations.compute_output.add(_slowest(images, "combine"))

    def failed(self, took_ms: float) -> None:
        self.inference_stats.fail.add(took_ms)


@dataclass(slots=True)
class AllStatistics:
    """The answer of /v2/models/stats."""

    model_stats: list[ModelStatistics]


def _slowest(images: Sequence[Classified], stage: str) -> float:
    times = [s.duration_ms for image in images for s in image.timings_ms.stages if s.stage == stage]
    return max(times, default=0.0)
