"""The JSON files that ``tandem ladder`` and the process of a rung exchange."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from models.errors import TandemError
from models.record import Record

# A rung's engine; the last four are preparations, which make files.
Engine = Literal[
    "torch", "onnxruntime", "openvino", "ensemble", "make_set", "labelled", "quantize", "export"
]
Outcome = Literal["measured", "prepared", "skipped", "failed"]
# In the work folder: the network as ONNX, the INT8 network of a member without one in its set, and
# [path, class index] of each labelled image.
ONNX_NAME, INT8_NAME, LABELLED_FILES = "network.onnx", "int8.xml", "labelled.json"
TorchSource = Literal["random", "float_ir", "none"]
Positive = Annotated[int, Field(ge=1)]


class LadderError(TandemError):
    """The requested ladder cannot be measured, or its results cannot be written."""

    code = "ladder"


class RungError(TandemError):
    """A message to or from the process of a rung cannot be read."""

    code = "rung"


class RungOptions(Record):
    """How a network is run; a rung changes some of these and keeps the rest."""

    batch: Positive = 1  # images per call
    threads: Positive | None = None  # per call; None: the runtime's default
    callers: Positive = 1  # calls at a time, each from its own thread
    # PyTorch's
    is_inference_mode: bool = False
    is_channels_last: bool = False
    mode: Literal["eager", "script", "compile"] = "eager"
    # OpenVINO's
    hint: Literal["none", "latency", "throughput"] = "none"
    is_static: bool = False  # whether the batch size is part of the network's shape
    streams: Positive | None = None  # None: by the hint
    precision: Literal["FP16", "INT8"] = "FP16"  # of the file; FP16: the float network
    # Both: the type in which layers that are not INT8 compute.
    float_type: Literal["f32", "bf16", "f16"] = "f32"
    # The ensemble's: other members are skipped if the first one's margin is at least this.
    cascade_margin: float | None = None


class RungNetwork(Record):
    """The network of a ladder: a member of a model set, and where its PyTorch source comes from."""

    name: str  # the member's; with random weights a name in torchvision
    size: Positive  # px, the side of the input
    num_classes: Annotated[int, Field(ge=2)]
    model_set: Path  # folder of the set, in which random weights are made
    torch_source: TorchSource
    is_random: bool = False  # for speed only


class RungTask(Record):
    """The work of a process."""

    engine: Engine
    network: RungNetwork
    work: Path  # shared by the rungs of a ladder: networks, labelled pixels
    seconds: Annotated[float, Field(gt=0)] = 10.0  # of measuring
    cores: Positive = 1
    choices: Annotated[tuple[RungOptions, ...], Field(min_length=1)] = (RungOptions(),)
    images: Path | None = None  # of "labelled": ImageFolder or CSV
    max_images: Annotated[int, Field(ge=0)] = 0  # of "labelled"; 0: all


class Figures(Record):
    """The measurements of a rung."""

    images_per_s: float
    p50_ms: float  # of a call with ``batch`` images
    cpu_ms_per_image: float
    utilisation: float  # mean share of the cores, 0..1
    utilisation_spread: float  # standard deviation of its samples, in the same unit
    pss_mib: float | None = None  # proportional set size: shared pages count in part
    rss_mib: float
    num_images: int
    seconds: float
    top1: float | None = None
    num_labelled: int = 0
    watts: float | None = None  # of all CPU packages; None if unreadable


class RungResult(Record):
    """The stored outcome of a rung."""

    outcome: Outcome
    reason: str = ""  # why it was skipped or failed
    chosen: RungOptions = RungOptions()
    figures: Figures | None = None
    prepared_s: float = 0.0  # from the process's start to the first measurement
    notes: tuple[str, ...] = ()


def read_result(path: Path) -> RungResult:
    """Read a result; raise :class:`RungError` if the file is not one."""
    try:
        return RungResult.model_validate_json(path.read_bytes())
    except OSError as error:
        raise RungError(f"cannot read {path}: {error.strerror}") from error
    except ValidationError as error:
        raise RungError(f"{path} is no result of a rung: {error.error_count()} mistakes") from error
