"""A member's ONNX file for ONNX Runtime, and the trial run before it is accepted."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from calibration.sets.batch import NUM_TRIED, TensorLayout, check_independent, trial_images
from calibration.sets.classes import ClassMap
from calibration.sets.fold import ColorOrder, Normalisation
from calibration.sets.task import Ending, Outputs, check_numbers, missing_ending, task_of
from models.ensemble import Probabilities
from models.errors import ModelSetError
from models.record import SUFFIXES, Precision, RuntimeName, Task
from models.runtimes.interface import LoadedNetwork
from models.runtimes.load import load
from models.runtimes.options import Pixels, RuntimeOptions

Sides = tuple[int | None, ...]  # of a tensor; None: left open


@dataclass(frozen=True)
class ImportedFile:
    """A folded network as a single file for its runtime."""

    runtime: RuntimeName
    content: bytes
    input_size: int
    num_classes: int
    precision: Precision
    fixed_batch: int | None = None
    task: Task = "classification"
    facts: str = ""  # as of an Imported
    doubt: str | None = None


@dataclass(frozen=True)
class FileOptions:
    """How to read a file; see :func:`calibration.sets.import_network.import_network`."""

    input_size: int | None = None
    normalisation: Normalisation = field(default_factory=Normalisation)
    outputs: Outputs = "auto"
    layout: TensorLayout | None = None
    pixel_order: ColorOrder | None = None
    classes: ClassMap | None = None
    task: Task | None = None  # None: multi-label if it ends in a sigmoid, else classification


@dataclass(frozen=True)
class Finish:
    """The layers appended to a network's output: a missing softmax or sigmoid, and classes."""

    task: Task
    ending: Ending | None = None
    classes: ClassMap | None = None  # None: its own

    @property
    def shares_one(self) -> bool:
        """Whether the probabilities of the selected classes must be rescaled to sum to 1."""
        return self.classes is not None and self.ending is None and self.task == "classification"


Make = Callable[[Finish], ImportedFile]


def layout_and_size(
    sides: Sides, facts: str, options: FileOptions
) -> tuple[TensorLayout, int, int | None]:
    """Return the layout, the side in pixels and the built-in batch of an input's four sides.

    Raises:
        ModelSetError: it is not a square colour image; ``facts`` begins the message.

    """
    if len(sides) != 4:
        raise ModelSetError(f"{facts}; a member takes images, [N,3,H,W] or [N,H,W,3]")
    layout: TensorLayout = options.layout or ("NCHW" if sides[1] == 3 else "NHWC")
    channels = sides[1] if layout == "NCHW" else sides[3]
    height, width = sides[2:] if layout == "NCHW" else sides[1:3]
    if channels != 3:
        raise ModelSetError(f"{facts}; no side is 3 channels: a member takes colour images")
    if height != width:
        raise ModelSetError(f"{facts}; a member takes squares")
    size = height or options.input_size
    if size is None:
        raise ModelSetError(f"{facts}: its size is open, so say --input-size (224 for ImageNet)")
    if options.input_size not in (None, size):
        raise ModelSetError(f"{facts}, --input-size says {options.input_size}")
    return layout, size, sides[0]


def num_classes_of(sides: Sides, facts: str) -> int:
    """Return C of an output (N, C), (N, C, 1, 1) or (N, 1, 1, C).

    Raises:
        ModelSetError: it is not a row of classes; ``facts`` begins the message.

    """
    wide = [side for side in sides[1:] if side != 1]
    if len(sides) < 2 or len(wide) > 1 or None in wide:
        raise ModelSetError(
            f"{facts}; a member gives probabilities [?,C], one row an image: networks for "
            "detection, segmentation or features are no classifiers"
        )
    return int(wide[0] or 1) if wide else 1


def tried(make: Make, path: Path, options: FileOptions, own: Ending | None) -> ImportedFile:
    """Make the file, run it on images, and append softmax or a sigmoid if it ends in logits.

    ``own`` is what its graph ends in.

    Raises:
        ModelSetError: its runtime cannot run it, or its rows do not fit its task.

    """
    task = task_of(path, options.outputs, options.task, own)
    made = make(Finish(task))
    rows = _answers(made, path)
    ending = missing_ending(rows, path, options.outputs, task, own)
    if ending is not None:
        made = make(Finish(task, ending))
        check_numbers(_answers(made, path, is_probabilities=True), path)
    else:
        _answers(made, path, is_probabilities=True)
    if (classes := options.classes) is None or classes.own == classes.wanted:
        return made
    if made.num_classes != len(classes.own):
        raise ModelSetError(
            f"{path} has {made.num_classes} classes, {classes.where} {len(classes.own)} ids: "
            "they are not of the same network"
        )
    return make(Finish(task, ending, classes))


def answers_of(made: ImportedFile, path: Path, images: Pixels) -> Probabilities:
    """Return the rows of images that the file's own runtime computes."""
    with _loaded(made, path) as network:
        return np.concatenate([network.predict(image[None]) for image in images])


@contextmanager
def _loaded(made: ImportedFile, path: Path) -> Iterator[LoadedNetwork]:
    """Load the file, which was made from ``path``; errors name ``path``."""
    with tempfile.TemporaryDirectory(prefix="tandem-add-") as folder:
        file = Path(folder) / f"{path.stem}{SUFFIXES[made.runtime]}"
        file.write_bytes(made.content)
        try:
            network = load(file, RuntimeOptions(batch_sizes=(1, NUM_TRIED)))
            if network.num_classes != made.num_classes:
                raise ModelSetError(
                    f"{path} says that it gives {made.num_classes} classes, but computes "
                    f"{network.num_classes}: export it again"
                )
            yield network
        except ModelSetError as error:
            raise ModelSetError(error.message.replace(str(file), str(path))) from error


def _answers(made: ImportedFile, path: Path, *, is_probabilities: bool = False) -> Probabilities:
    """Return the rows of a few images; raise if the runtime cannot run the file.

    Those that are probabilities must be the same whatever the other images are.
    """
    with _loaded(made, path) as network:
        if is_probabilities:
            check_independent(network, path, made.precision)
        return network.predict(trial_images(NUM_TRIED, network.input_shape))
