"""A member's ONNX file for ONNX Runtime, and the trial run before it is accepted."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from calibration.sets.batch import NUM_TRIED, check_independent, trial_images
from calibration.sets.classes import ClassMap
from calibration.sets.file_options import FileOptions
from calibration.sets.import_network import Imported
from calibration.sets.task import Ending, check_numbers, missing_ending, task_of
from models.ensemble import Probabilities
from models.errors import ModelSetError
from models.record import Task
from models.runtimes.interface import LoadedNetwork
from models.runtimes.load import load
from models.runtimes.options import Pixels, RuntimeOptions


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


Make = Callable[[Finish], Imported]


def tried(make: Make, path: Path, options: FileOptions, own: Ending | None) -> Imported:
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
    classes.check_fits(made.num_classes, path)
    return make(Finish(task, ending, classes))


def answers_of(made: Imported, path: Path, images: Pixels) -> Probabilities:
    """Return the rows of images that ONNX Runtime computes."""
    with _loaded(made, path) as network:
        return np.concatenate([network.predict(image[None]) for image in images])


@contextmanager
def _loaded(made: Imported, path: Path) -> Iterator[LoadedNetwork]:
    """Load the file, which was made from ``path``; errors name ``path``."""
    assert isinstance(made.network, bytes)
    with tempfile.TemporaryDirectory(prefix="tandem-add-") as folder:
        file = Path(folder) / f"{path.stem}.onnx"
        file.write_bytes(made.network)
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


def _answers(made: Imported, path: Path, *, is_probabilities: bool = False) -> Probabilities:
    """Return the rows of a few images; raise if the runtime cannot run the file.

    Those that are probabilities must be the same whatever the other images are.
    """
    with _loaded(made, path) as network:
        if is_probabilities:
            check_independent(network, path, made.precision)
        return network.predict(trial_images(NUM_TRIED, network.input_shape))
