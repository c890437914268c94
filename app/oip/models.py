"""The models of the protocol, and its documents on server and models.

The ensemble has its set's name, each member SET.MEMBER. The documents are dataclasses whose schema
/docs shows. The fields have the protocol's names, in JSON and in protobuf messages alike.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any

from app.answers import Classified
from app.errors import BadTensorError, UnknownModelError
from app.graph.served_models import ServedModels
from app.oip.tensors import InferRequest, Tensor, shown
from models.image import Size, sides_of
from models.machine import DISTRIBUTION

SERVER = "tandem"
PLATFORM = "openvino_ir"
IMAGE, PIXELS = "image", "pixels"
PROBABILITIES, LABEL = "probabilities", "label"
OUTPUTS = (PROBABILITIES, LABEL)
EMBEDDING = "embedding"  # an output that is there where it is asked for, (N, F)
FIRST_VERSION = "1"  # the version number of every model, for clients that require one
ANY_VERSION = ("", "0", FIRST_VERSION)  # 0 is the latest to OpenVINO Model Server's clients

# Triton's extensions that are implemented here.
EXTENSIONS = (
    *("binary_tensor_data", "classification", "model_repository"),
    *("model_configuration", "parameters", "schedule_policy", "statistics"),
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
class ConfiguredInput:
    """An input of Triton's model configuration; ``dims`` are those of one image."""

    name: str
    data_type: str
    dims: list[int]
    optional: bool = True  # a request has one of the inputs


@dataclass(slots=True)
class ConfiguredOutput:
    """An output of Triton's model configuration; -1 in ``dims``: of any size."""

    name: str
    data_type: str
    dims: list[int]


@dataclass(slots=True)
class ModelConfiguration:
    """A model in the form of Triton's model configuration."""

    name: str
    max_batch_size: int  # images of a request
    input: list[ConfiguredInput]
    output: list[ConfiguredOutput]
    response_cache: dict[str, bool]
    dynamic_batching: dict[str, int]
    platform: str = PLATFORM
    backend: str = SERVER
    version_policy: dict[str, Any] = field(default_factory=lambda: {"latest": {"num_versions": 1}})


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


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The properties of a model that requests are checked against."""

    name: str
    version: str  # the fingerprint of the set
    member: str | None  # None for the ensemble
    input_size: Size | None  # None: members' sizes differ, so clients cannot send pixels
    labels: tuple[str, ...]
    threshold: float | None = None  # of a multi-label set
    model_set: str | None = None  # for a service with several sets
    is_asked_by_version: bool = False  # asked for by its fingerprint: no other may answer
    embedding: int | None = None  # its length, of a member; None: none is listed

    def metadata(self) -> ModelMetadata:
        """Describe inputs and outputs; the first dimension is the images'.

        In a multi-label set the labels have the shape (N, K): K is the most labels of any image.
        Empty labels fill shorter rows.
        """
        of_labels = [-1] if self.threshold is None else [-1, -1]
        inputs = [TensorMetadata(IMAGE, "BYTES", [-1])]
        if (size := self.input_size) is not None:
            inputs.append(TensorMetadata(PIXELS, "UINT8", [-1, *sides_of(size), 3]))
        outputs = [
            TensorMetadata(PROBABILITIES, "FP32", [-1, len(self.labels)]),
            TensorMetadata(LABEL, "BYTES", of_labels),
        ]
        if self.embedding is not None:  # the ensemble's is of the member that a request names
            outputs.append(TensorMetadata(EMBEDDING, "FP32", [-1, self.embedding]))
        versions = [self.version, FIRST_VERSION]
        return ModelMetadata(self.name, versions, PLATFORM, inputs, outputs)

    def input_of(self, request: InferRequest) -> Tensor:
        """Return the only input of a request: encoded images, or pixels of the right size.

        Raises :class:`BadTensorError` if there are no inputs, or several, or its name, datatype or
        shape is wrong.
        """
        names = [tensor.name for tensor in request.inputs]
        if unknown := next((name for name in names if name not in (IMAGE, PIXELS)), None):
            raise BadTensorError(
                f"{self.name} has no input {shown(unknown)}; it has {IMAGE} and {PIXELS}"
            )
        if len(names) != 1:
            raise BadTensorError(
                f"the request has {len(names)} inputs; send one, {IMAGE} or {PIXELS}"
            )
        self._check_input(request.inputs[0])
        return request.inputs[0]

    def _check_input(self, tensor: Tensor) -> None:
        size, shape = self.input_size, tensor.shape
        if tensor.name == IMAGE:
            datatype, fits, form = "BYTES", shape[1:] in ((), (1,)), "[N] or [N,1]"
        elif size is None:
            raise BadTensorError(
                f"the members of {self.name} take several sizes, so it takes no {PIXELS}: send "
                f"files ({IMAGE}), or pixels to one member ({self.name}.NAME) in its size"
            )
        else:
            height, width = sides_of(size)
            form = f"[N,{height},{width},3], in the order blue, green, red, or [N,...,1] of grey"
            datatype, fits = "UINT8", shape[1:] in ((height, width, 3), (height, width, 1))
        if tensor.datatype != datatype:
            raise BadTensorError(
                f"input {tensor.name} has datatype {tensor.datatype}; it is {datatype}"
            )
        if not shape or not fits:
            raise BadTensorError(f"input {tensor.name} has shape {list(shape)}; it is {form}")

    def embedding_of(self, request: InferRequest) -> str | None:
        """Return the member whose pooled features the request asks for; None: none.

        Raises :class:`BadTensorError` if it does not say which, or means another than this one.
        """
        name = request.embedding
        if name is None and any(output.name == EMBEDDING for output in request.outputs):
            name = self.member
            if name is None:
                raise BadTensorError(
                    f"output {EMBEDDING} is of one member: name it in the parameter {EMBEDDING}, "
                    f"or ask the model {self.name}.MEMBER"
                )
        if self.member is not None and name not in (None, self.member):
            raise BadTensorError(
                f"parameter {EMBEDDING} is {shown(name)}; the model {self.name} has its own alone"
            )
        return name

    def check_outputs(self, request: InferRequest) -> None:
        """Raise :class:`BadTensorError` if a requested output does not exist or is repeated."""
        names, known = [output.name for output in request.outputs], (*OUTPUTS, EMBEDDING)
        if (unknown := next((name for name in names if name not in known), None)) is not None:
            raise BadTensorError(
                f"{self.name} has no output {shown(unknown)}; it has {', '.join(known)}"
            )
        if len(set(names)) != len(names):
            raise BadTensorError("an output is asked for twice; ask for each once")
        if any(output.num_classes and output.name != PROBABILITIES for output in request.outputs):
            raise BadTensorError(f"classification is of the output {PROBABILITIES} alone")


class Models:
    """The models of a service: of its first set, then of others."""

    def __init__(self, served: ServedModels, *others: ServedModels) -> None:
        first = served.model_set if others else None
        models = list(_models_of(served, first))
        models += [model for other in others for model in _models_of(other, other.model_set)]
        self._by_name = {model.name: model for model in models}

    def find(self, name: str, version: str = "") -> ServedModel:
        """Return a model, in any version if ``version`` is empty.

        Raises :class:`UnknownModelError` if there is no such model or version.
        """
        if (model := self._by_name.get(name)) is None:
            raise UnknownModelError(
                f"no model {shown(name)} is served; there are {', '.join(self._by_name)}"
            )
        if version not in (*ANY_VERSION, model.version):
            raise UnknownModelError(
                f"{name} has no version {shown(version)}; it has version {model.version}, which "
                f"0 and {FIRST_VERSION} stand for too"
            )
        return replace(model, is_asked_by_version=True) if version == model.version else model

    @property
    def all(self) -> list[ServedModel]:
        """The models: each ensemble before its members, the first set first."""
        return list(self._by_name.values())


def _models_of(served: ServedModels, model_set: str | None) -> Iterator[ServedModel]:
    name, labels = served.model_set, tuple(served.labels)
    version, least = served.model_version, served.threshold
    sizes = {member.input_size for member in served.members}
    one_size = served.input_size if sizes == {served.input_size} else None
    ensemble = ServedModel(name, version, None, one_size, labels, least, model_set)
    yield ensemble
    for member in served.members:
        yield replace(
            ensemble,
            name=f"{name}.{member.name}",
            member=member.name,
            input_size=member.input_size,
            embedding=member.embedding,
        )


def server_metadata(*, has_shared_memory: bool = False) -> ServerMetadata:
    """Describe the server."""
    extensions = [*EXTENSIONS, *([SHARED_MEMORY] if has_shared_memory else [])]
    return ServerMetadata(SERVER, version(DISTRIBUTION), extensions)
