"""The rungs of a ladder: what each changes, their results, and the files of these."""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from models.ensemble import PlanName
from models.errors import TandemError
from models.files import locked, make_folder, write_result
from models.image_files import first_not_utf8
from models.machine import available_cpus
from models.manifest import read_manifest
from models.model_set import ModelSet
from models.record import Record

Engine = Literal["torch", "onnxruntime", "openvino", "ensemble", "service"]
Preparation = Literal["make_set", "labelled", "quantize", "export"]  # makes files for rungs
Positive = Annotated[int, Field(ge=1)]

SERVICE: Literal["service"] = "service"  # the rung that runs ``tandem serve``
# In the work folder: PHOTOS has links to the labelled images, in the order of their classes' file.
RESULTS, LOGS, PHOTOS, TRUTH = "results", "logs", "photos", "labelled-truth.npy"
MADE_ONCE = "prepare-"  # prefix of the results of preparations


class LadderError(TandemError):
    """The requested ladder cannot be measured, or its results cannot be written."""

    code = "ladder"


class SkippedError(TandemError):
    """A rung that the machine or the installation cannot run; the message says why."""

    code = "skipped"


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
    plan: PlanName = "full"  # the ensemble's


class RungNetwork(Record):
    """The network of a ladder: a member of a model set, and where its PyTorch source comes from."""

    name: str  # the member's; with random weights a name in torchvision
    size: Positive | tuple[Positive, Positive]  # px: of a square, or height and width
    num_classes: Annotated[int, Field(ge=2)]
    model_set: Path  # folder of the set, in which random weights are made
    torch_source: Literal["random", "float_ir", "none"]

    @property
    def is_random(self) -> bool:
        """Whether its weights are random, for speed only."""
        return self.torch_source == "random"


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

    outcome: Literal["measured", "prepared", "skipped", "failed"]
    reason: str = ""  # why it was skipped or failed
    chosen: RungOptions = RungOptions()
    figures: Figures | None = None
    prepared_s: float = 0.0  # from the process's start to the first measurement
    notes: tuple[str, ...] = ()


Choices = Sequence[RungOptions]  # of which the fastest is measured
Say = Callable[[str], None]  # gets the progress of a rung


@dataclass(frozen=True)
class Rung:
    """A step of the ladder: its engine, and the changes that it tries.

    A rung builds on the fastest earlier rung of the same engine, and changes its options. Of
    several changes it measures the one with the highest throughput in a short run.
    """

    name: str
    title: str
    engine: Engine
    changes: Sequence[Mapping[str, Any]] = ({},)
    needs: Preparation | None = None  # made once

    def choices(self, base: RungOptions) -> tuple[RungOptions, ...]:
        """Return the options to try, without repetitions."""
        changed = (base.model_copy(update=dict(change)) for change in self.changes)
        return tuple(dict.fromkeys(changed))


def rungs(cores: int) -> tuple[Rung, ...]:
    """Return every rung of a ladder on ``cores`` cores, in its order."""
    counts = sorted({1, max(1, cores // 2), cores})
    threads = [{"threads": n, "callers": cores // n} for n in counts]
    sizes = [{"batch": 1}, {"batch": 8}]
    throughput = [size | {"hint": "throughput"} for size in sizes]
    streams = [{"streams": n} for n in sorted({1, cores, 2 * cores})]
    low_precision = [{"float_type": "bf16"}, {"float_type": "f16"}]
    int8: dict[str, Any] = {"precision": "INT8"}
    # The service's options: without a float network no earlier rung was measured.
    served = int8 | {"float_type": "f32", "is_static": True, "streams": cores}
    quantised = [int8, int8 | {"float_type": "f32"}, *(int8 | size for size in sizes)]
    quantised += [served | size for size in sizes]
    whole = int8 | {"batch": 8}
    return (
        Rung("eager", "PyTorch, eager, one by one", "torch"),
        Rung("inference_mode", "inference mode", "torch", [{"is_inference_mode": True}]),
        Rung("batches", "batches", "torch", [{"batch": n} for n in (4, 8, 16)]),
        Rung("threads", "threads", "torch", threads),
        Rung("channels_last", "channels last", "torch", [{"is_channels_last": True}]),
        Rung("torchscript", "TorchScript, frozen", "torch", [{"mode": "script"}]),
        Rung("compile", "torch.compile", "torch", [{"mode": "compile"}]),
        Rung("torch_bf16", "PyTorch, bfloat16", "torch", [{"float_type": "bf16"}]),
        Rung("onnxruntime", "ONNX Runtime", "onnxruntime", sizes, "export"),
        Rung("openvino", "OpenVINO, float", "openvino", sizes),
        Rung("latency", "latency hint", "openvino", [{"hint": "latency", "batch": 1}]),
        Rung("throughput", "throughput hint", "openvino", throughput),
        Rung("fixed_shapes", "fixed shapes", "openvino", [{"is_static": True}]),
        Rung("streams", "streams", "openvino", streams),
        Rung("low_precision", "bfloat16 or float16", "openvino", low_precision),
        Rung("int8", "INT8 by NNCF", "openvino", quantised, "quantize"),
        Rung("ensemble", "all members, INT8", "ensemble", [whole]),
        Rung("fast", "by the set's fast plan", "ensemble", [whole | {"plan": "fast"}]),
        Rung(SERVICE, "the service, over HTTP", SERVICE),
    )


@dataclass(frozen=True)
class LadderJob:
    """What to measure, and why some rungs are impossible; the process of each rung gets it, too."""

    network: RungNetwork
    rungs: tuple[Rung, ...]
    work: Path
    impossible: Mapping[str, str]  # the reason, by the rung's name
    images: Path | None = None  # labelled ones
    max_images: int = 200
    seconds: float = 10.0
    fingerprint: str = ""  # of the networks' files; empty for random weights
    cores: int = field(default_factory=available_cpus)

    def __post_init__(self) -> None:
        """Refuse the names that the work folder's files cannot hold."""
        paths = (self.network.model_set, self.work, *filter(None, [self.images]))
        if (name := first_not_utf8(str(path.absolute()) for path in paths)) is not None:
            raise LadderError(f"the name {name!r} is not UTF-8, as a ladder's files are; rename it")

    @property
    def set_of_network(self) -> ModelSet:
        """The model set in its folder, which a preparation may have made."""
        return ModelSet(self.network.model_set, read_manifest(self.network.model_set))

    @property
    def has_images(self) -> bool:
        """Whether the labelled images are prepared."""
        return (self.work / TRUTH).is_file()

    @property
    def facts(self) -> dict[str, Any]:
        """Return the facts that results depend on; results with other facts are not continued."""
        plain = ("max_images", "seconds", "fingerprint", "cores")
        images = None if self.images is None else str(self.images.absolute())
        facts = {"network": self.network.model_dump(mode="json"), "images": images}
        return facts | {name: getattr(self, name) for name in plain}


class Store:
    """A work folder: results, a file each, and files that the rungs' processes share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def opened(self, facts: dict[str, Any], *, is_resumed: bool) -> Iterator[None]:
        """Make the folder, or continue its results of the same facts; lock it during the block.

        Raises :class:`LadderError` if another ladder uses the folder, its results have other facts,
        it is not writable, or it is neither empty nor a ladder's.
        """
        with ExitStack() as stack:
            try:
                make_folder(self.folder)
                held = locked(self.folder, os.O_RDONLY, fcntl.LOCK_EX | fcntl.LOCK_NB)
                stack.enter_context(held)
            except OSError as error:
                problem = f"cannot write {self.folder}: {error.strerror}; give"
                if isinstance(error, BlockingIOError):
                    problem = f"another ladder is at work in {self.folder}; wait, or give"
                raise LadderError(f"{problem} another --work") from error
            self._begin(facts, is_resumed=is_resumed)
            yield

    def _begin(self, facts: dict[str, Any], *, is_resumed: bool) -> None:
        job = self.folder / "job.json"  # marks the folder
        if not job.exists() and any(self.folder.iterdir()):
            raise LadderError(
                f"{self.folder} has files that are no ladder's; give --work an empty folder"
            )
        there: dict[str, Any] | None = None
        with suppress(OSError, ValueError, TypeError):
            there = dict(json.loads(job.read_text("utf-8")))
        if not is_resumed or there is None:
            self.remove_networks()
            for name in (RESULTS, LOGS):
                shutil.rmtree(self.folder / name, ignore_errors=True)
        elif other := sorted(key for key in facts if facts[key] != there.get(key)):
            raise LadderError(
                f"--resume: the results in {self.folder} were measured with other "
                f"{', '.join(other)}; leave --resume out to begin anew, or give another --work"
            )
        write_result(job, json.dumps(facts))
        for name in (RESULTS, LOGS):
            make_folder(self.folder / name)

    def read(self, name: str) -> RungResult | None:
        """Return the final result of a rung or preparation; failed ones are tried again."""
        with suppress(OSError, ValidationError):  # damaged, or of another version
            result = RungResult.model_validate_json(self._file(name).read_bytes())
            return None if result.outcome == "failed" else result
        return None

    def write(self, name: str, result: RungResult) -> None:
        """Store the result of a rung or preparation."""
        write_result(self._file(name), result.model_dump_json())

    def _file(self, name: str) -> Path:
        return self.folder / RESULTS / f"{name}.json"

    def remove_networks(self) -> None:
        """Remove the rungs' shared files, so that they are made again."""
        shared = ("*.npy", "*.onnx", "*int8.xml", "*int8.bin", f"{RESULTS}/{MADE_ONCE}*.json")
        for path in (path for pattern in shared for path in self.folder.glob(pattern)):
            path.unlink(missing_ok=True)
        for folder in (*self.folder.glob("*-random"), self.folder / PHOTOS):
            shutil.rmtree(folder, ignore_errors=True)

    def log(self, name: str) -> Path:
        """Return the log of a rung's processes."""
        return self.folder / LOGS / f"{name}.log"
