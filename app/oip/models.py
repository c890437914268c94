"""The models of the protocol: the ensemble by its set's name, each member as SET.MEMBER."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version

from app.errors import BadTensorError, UnknownModelError
from app.graph.served_models import ServedModels
from app.oip.documents import (
    EXTENSIONS,
    FIRST_VERSION,
    SHARED_MEMORY,
    ModelMetadata,
    ServerMetadata,
    TensorMetadata,
)
from app.oip.tensors import InferRequest, Tensor, shown
from models.machine import DISTRIBUTION

SERVER = "tandem"
PLATFORM = "openvino_ir"
IMAGE, PIXELS = "image", "pixels"
PROBABILITIES, LABEL = "probabilities", "label"
OUTPUTS = (PROBABILITIES, LABEL)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The properties of a model that requests are checked against."""

    name: str
    version: str  # the fingerprint of the set
    member: str | None  # None for the ensemble
    input_size: int | None  # None: members' sizes differ, so clients cannot send pixels
    labels: tuple[str, ...]
    threshold: float | None = None  # of a multi-label set
    model_set: str | None = None  # for a service with several sets
    is_asked_by_version: bool = False  # asked for by its fingerprint: no other may answer

    def metadata(self) -> ModelMetadata:
        """Describe inputs and outputs; the first dimension is the images'.

        In a multi-label set the labels have the shape (N, K): K is the most labels of any image.
        Empty labels fill shorter rows.
        """
        of_labels = [-1] if self.threshold is None else [-1, -1]
        inputs = [TensorMetadata(IMAGE, "BYTES", [-1])]
        if (size := self.input_size) is not None:
            inputs.append(TensorMetadata(PIXELS, "UINT8", [-1, size, size, 3]))
        return ModelMetadata(
            self.name,
            [self.version, FIRST_VERSION],
            PLATFORM,
            inputs,
            [
                TensorMetadata(PROBABILITIES, "FP32", [-1, len(self.labels)]),
                TensorMetadata(LABEL, "BYTES", of_labels),
            ],
        )

    def input_of(self, request: InferRequest) -> Tensor:
        """Return the only input of a request: encoded images, or pixels of the right size.

        Raises:
            BadTensorError: there are no inputs, or several, or its name, datatype or shape is
                wrong.

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
            form = f"[N,{size},{size},3], in the order blue, green, red"
            datatype, fits = "UINT8", shape[1:] == (size, size, 3)
        if tensor.datatype != datatype:
            raise BadTensorError(
                f"input {tensor.name} has datatype {tensor.datatype}; it is {datatype}"
            )
        if not shape or not fits:
            raise BadTensorError(f"input {tensor.name} has shape {list(shape)}; it is {form}")

    def check_outputs(self, request: InferRequest) -> None:
        """Raise :class:`BadTensorError` if a requested output does not exist or is repeated."""
        names = [output.name for output in request.outputs]
        if (unknown := next((name for name in names if name not in OUTPUTS), None)) is not None:
            raise BadTensorError(
                f"{self.name} has no output {shown(unknown)}; it has {' and '.join(OUTPUTS)}"
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

        Raises:
            UnknownModelError: there is no such model or version.

        """
        if (model := self._by_name.get(name)) is None:
            raise UnknownModelError(
                f"no model {shown(name)} is served; there are {', '.join(self._by_name)}"
            )
        if version not in ("", FIRST_VERSION, model.version):
            raise UnknownModelError(
                f"{name} has no version {shown(version)}; it has version {model.version}, which "
                f"{FIRST_VERSION} stands for too"
            )
        return replace(model, is_asked_by_version=True) if version == model.version else model

    @property
    def all(self) -> list[ServedModel]:
        """The models: each ensemble before its members, the first set first."""
        return list(self._by_name.values())


def _models_of(served: ServedModels, model_set: str | None) -> Iterator[ServedModel]:
    """Yield a set's ensemble, then its members."""
    name, labels = served.model_set, tuple(served.labels)
    version, least = served.model_version, served.threshold
    sizes = {member.name: member.input_size for member in served.members}
    one_size = served.input_size if set(sizes.values()) == {served.input_size} else None
    yield ServedModel(name, version, None, one_size, labels, least, model_set)
    for member, size in sizes.items():
        yield ServedModel(f"{name}.{member}", version, member, size, labels, least, model_set)


def server_metadata(*, has_shared_memory: bool = False) -> ServerMetadata:
    """Describe the server."""
    extensions = [*EXTENSIONS, *([SHARED_MEMORY] if has_shared_memory else [])]
    return ServerMetadata(SERVER, version(DISTRIBUTION), extensions)
