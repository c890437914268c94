"""The models of the protocol: the ensemble by its set's name, each member as SET.MEMBER."""

from dataclasses import dataclass
from importlib.metadata import version

from app.errors import BadTensorError, UnknownModelError
from app.oip.documents import (
    EXTENSIONS,
    FIRST_VERSION,
    SHARED_MEMORY,
    IndexEntry,
    ModelMetadata,
    ServerMetadata,
    TensorMetadata,
)
from app.oip.request import InferRequest
from app.oip.tensors import Tensor, shown
from app.responses import ServedModels
from models.extras import DISTRIBUTION

SERVER = "tandem"
PLATFORM = "openvino_ir"
IMAGE, PIXELS = "image", "pixels"
PROBABILITIES, LABEL = "probabilities", "label"
OUTPUTS = (PROBABILITIES, LABEL)
READY = "READY"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What requests are checked against."""

    name: str
    version: str  # the fingerprint of the set
    member: str | None  # None: the ensemble
    input_size: int | None  # None: its members take several, so there are no pixels to be sent
    labels: tuple[str, ...]
    threshold: float | None = None  # of a multi-label set

    def metadata(self) -> ModelMetadata:
        """Describe inputs and outputs; the first dimension is the images'.

        Of a multi-label set an image has several labels: as many as the image of the request that
        has most, filled up with empty ones.
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
        """Return the one input of a request: encoded images, or pixels of the right size.

        Raises:
            BadTensorError: there is none or another, or its datatype or shape do not fit.

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
        """Raise :class:`BadTensorError` if an output is asked for that is none, or twice."""
        names = [output.name for output in request.outputs]
        if unknown := next((name for name in names if name not in OUTPUTS), None):
            raise BadTensorError(
                f"{self.name} has no output {shown(unknown)}; it has {' and '.join(OUTPUTS)}"
            )
        if len(set(names)) != len(names):
            raise BadTensorError("an output is asked for twice; ask for each once")
        if any(output.num_classes and output.name != PROBABILITIES for output in request.outputs):
            raise BadTensorError(f"classification is of the output {PROBABILITIES} alone")


class Models:
    """The models that one service has."""

    def __init__(self, served: ServedModels) -> None:
        labels, name = tuple(served.labels), served.model_set
        sizes = {member.name: member.input_size for member in served.members}
        one_size = served.input_size if set(sizes.values()) == {served.input_size} else None
        least, self.version = served.threshold, served.model_version
        self._by_name = {name: ServedModel(name, self.version, None, one_size, labels, least)} | {
            f"{name}.{member}": ServedModel(
                f"{name}.{member}", self.version, member, size, labels, least
            )
            for member, size in sizes.items()
        }

    @property
    def names(self) -> list[str]:
        """The ensemble's name first."""
        return list(self._by_name)

    def find(self, name: str, version: str = "") -> ServedModel:
        """Return a model or raise :class:`UnknownModelError`; no version: the one there is."""
        if (model := self._by_name.get(name)) is None:
            raise UnknownModelError(
                f"no model {shown(name)} is served; there are {', '.join(self._by_name)}"
            )
        if version not in ("", FIRST_VERSION, self.version):
            raise UnknownModelError(
                f"{name} has no version {shown(version)}; it has version {self.version}, which "
                f"{FIRST_VERSION} stands for too"
            )
        return model

    def index(self) -> list[IndexEntry]:
        return [IndexEntry(name, self.version, READY, "") for name in self._by_name]


def server_metadata(*, has_shared_memory: bool = False) -> ServerMetadata:
    """Describe the server."""
    extensions = [*EXTENSIONS, *([SHARED_MEMORY] if has_shared_memory else [])]
    return ServerMetadata(SERVER, version(DISTRIBUTION), extensions)
