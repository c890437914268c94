"""What ``tandem ladder`` and the process of one rung tell each other, as JSON files."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from models.errors import TandemError
from models.record import Record

# A rung's engine; the last four are preparations, whose results are files.
Engine = Literal[
    "torch", "onnxruntime", "openvino", "ensemble", "make_set", "labelled", "quantize", "export"
]
Outcome = Literal["measured", "prepared", "skipped", "failed"]
LABELLED_FILES = "labelled.json"  # in the work folder: [path, class index] of each labelled image
TorchSource = Literal["random", "float_ir", "none"]
Positive = Annotated[int, Field(ge=1)]


class LadderError(TandemError):
    """What the command line asks for cannot be measured, or its results cannot be kept."""

    code = "ladder"


class RungError(TandemError):
    """What the process of a rung was told, or told, cannot be read."""

    code = "rung"


class RungOptions(Record):
    """How a network is run; a rung changes some of these and keeps the rest."""

    batch: Positive = 1  # images a call
    threads: Positive | None = None  # of one call; None: the runtime's own default
    callers: Positive = 1  # calls at a time, each from a thread of its own
    # PyTorch's
    is_inference_mode: bool = False
    is_channels_last: bool = False
    mode: Literal["eager", "script", "compile"] = "eager"
    # OpenVINO's
    hint: Literal["none", "latency", "throughput"] = "none"
    is_static: bool = False  # the batch is part of the network's shape
    streams: Positive | None = None  # None: as the hint says
    precision: Literal["FP16", "INT8"] = "FP16"  # of the file; FP16: the float network
    # Both: what layers that are not INT8 compute in.
    float_type: Literal["f32", "bf16", "f16"] = "f32"
    # The ensemble's: the others are skipped where the first member's margin is at least this.
    cascade_margin: float | None = None


class RungNetwork(Record):
    """The network of a ladder: a member of a model set, and where its PyTorch source comes from."""

    name: str  # the member's; of random weights the name in torchvision
    size: Positive  # px, the side of the input
    num_classes: Annotated[int, Field(ge=2)]
    model_set: Path  # folder of the set; of random weights it is made there
    torch_source: TorchSource
    is_random: bool = False  # weights without meaning: speed only


class RungTask(Record):
    """One process's work."""

    engine: Engine
    network: RungNetwork
    work: Path  # folder that the rungs of one ladder share: networks made, labelled pixels
    seconds: Annotated[float, Field(gt=0)] = 10.0  # of measuring
    cores: Positive = 1
    choices: Annotated[tuple[RungOptions, ...], Field(min_length=1)] = (RungOptions(),)
    images: Path | None = None  # of "labelled": ImageFolder or CSV
    max_images: Annotated[int, Field(ge=0)] = 0  # of "labelled"; 0: all


class Figures(Record):
    """What a rung's measurement gave."""

    images_per_s: float
    p50_ms: float  # of a call, which has ``batch`` images
    cpu_ms_per_image: float
    utilisation: float  # mean share of the cores, 0..1
    utilisation_spread: float  # standard deviation of its samples, in the same unit
    pss_mib: float | None = None  # proportional set size: shared pages count in part
    rss_mib: float
    num_images: int
    seconds: float
    top1: float | None = None
    num_labelled: int = 0
    watts: float | None = None  # of all CPU packages; None: the machine does not tell


class RungResult(Record):
    """A rung's outcome, as it is kept."""

    outcome: Outcome
    reason: str = ""  # why it was skipped, or what failed
    chosen: RungOptions = RungOptions()
    figures: Figures | None = None
    prepared_s: float = 0.0  # from the process's start to the first measurement
    notes: tuple[str, ...] = ()


def read_result(path: Path) -> RungResult:
    """Read a result; raise :class:`RungError` if it is none."""
    try:
        return RungResult.model_validate_json(path.read_bytes())
    except OSError as error:
        raise RungError(f"cannot read {path}: {error.strerror}") from error
    except ValidationError as error:
        raise RungError(f"{path} is no result of a rung: {error.error_count()} mistakes") from error
