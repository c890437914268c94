"""What the protocol tells of server and models: plain dataclasses, which /docs describes.

The names of the fields are the protocol's, in JSON and in protobuf messages alike.
"""

from dataclasses import dataclass, field
from typing import Any

# Of Triton's extensions, those that are served here.
EXTENSIONS = (
    "binary_tensor_data",
    "classification",
    "model_repository",
    "parameters",
    "schedule_policy",
    "statistics",
)
SHARED_MEMORY = "system_shared_memory"  # where the setting shared_memory is on


@dataclass(slots=True)
class ProtocolError:
    """Every status from 400 up has this body."""

    error: str


@dataclass(slots=True)
class Live:
    """The answer of /v2/health/live."""

    live: bool


@dataclass(slots=True)
class ServerReady:
    """The answer of /v2/health/ready."""

    ready: bool


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
        """Count one more."""
        self.count += 1
        self.ns += int(ms * 1e6)


@dataclass(slots=True)
class InferStatistics:
    """Of requests: whole, and their slowest image's stages (decode, queue, infer, combine)."""

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
    """What this Gateway answered by this protocol since it started."""

    name: str
    version: str
    last_inference: int = 0  # ms since 1970
    inference_count: int = 0  # images
    execution_count: int = 0  # requests: a batch mixes several, and /v1's
    inference_stats: InferStatistics = field(default_factory=InferStatistics)
    batch_stats: list[dict[str, Any]] = field(default_factory=list)  # see the service's metrics


@dataclass(slots=True)
class AllStatistics:
    """The answer of /v2/models/stats."""

    model_stats: list[ModelStatistics]
