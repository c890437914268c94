"""Reads a member's file for its runtime; refuses pickles.

A PyTorch file is converted first. An ONNX file for ONNX Runtime is run on a few images before it is
accepted, and OpenVINO's answers to an ONNX file are compared with ONNX Runtime's, if installed.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np

from calibration.sets.ending import (
    Ending,
    Own,
    check_numbers,
    is_probability,
    missing_ending,
    task_of,
)
from calibration.sets.files import INSTEAD, ONNX, PYTORCH_SUFFIXES, check_kind, converted
from calibration.sets.import_network import NUM_ASKED, Imported, import_network
from calibration.sets.input import NUM_TRIED, check_independent, trial_images
from calibration.sets.input_range import fitted_file
from calibration.sets.options import ClassMap, FileOptions
from models.ensemble import Probabilities
from models.errors import ModelSetError, TandemError
from models.image import sides_of
from models.machine import check_installed, needs_extra
from models.network import LoadedNetwork, Pixels, RuntimeOptions, load
from models.openvino_network import last_line
from models.record import RuntimeName, Task

# Loading these runs their code, and gives no network: a pickle can call any function.
REFUSED = (".pkl", ".pickle", ".ckpt", ".joblib")
STATE = ".safetensors"
SAID = 0.01  # a smaller difference of probabilities is not reported


def import_member(
    path: Path, runtime: RuntimeName, options: FileOptions, *, is_trusted: bool = False
) -> Imported:
    """Read a classifier as a member's network; a PyTorch file is converted first.

    Args:
        path: IR, ONNX or TFLite; or PyTorch's .pt2 or TorchScript.
        runtime: of the member.
        options: for reading the file.
        is_trusted: whether a PyTorch file may be loaded, which runs its code.

    Raises:
        MissingExtraError: the runtime, or PyTorch, is not installed.
        ModelSetError: the file is not a single classifier, is not trusted, or is of a kind that is
            never opened.
    """
    if path.suffix in REFUSED:
        raise ModelSetError(
            f"{path}: a {path.suffix} is a pickle, and loading a pickle runs code in it, so it is "
            f"not opened. {INSTEAD}"
        )
    check_kind(path)
    if runtime == "onnxruntime" and path.suffix not in (ONNX, *PYTORCH_SUFFIXES):
        raise ModelSetError(
            f"{path} is no file for onnxruntime, which takes ONNX, or "
            f"{', '.join(PYTORCH_SUFFIXES)} of PyTorch"
        )
    if runtime != "openvino":
        check_installed(runtime, runtime, f"models add of {path.name} for {runtime}")
    size, layout = options.input_size, options.layout
    if path.suffix not in PYTORCH_SUFFIXES:
        return _imported(path, runtime, options, None)
    with converted(path, runtime, size, layout, is_trusted=is_trusted) as made:
        return _imported(path, runtime, options, made)


def _imported(
    path: Path, runtime: RuntimeName, options: FileOptions, made: Path | None
) -> Imported:
    if runtime == "onnxruntime":
        with needs_extra(runtime, f"models add of {path.name}"):
            from calibration.sets.onnx_graph import import_onnx
        fit = fitted_file(made or path, path, options)
        try:
            network = import_onnx(path, fit.options, made)
            facts = network.facts.replace(";", f"{fit.note};", 1)
            doubt = fit.doubt or network.doubt
            return replace(network, facts=facts, doubt=doubt, wanted=fit.wanted)
        except TandemError:
            raise
        except Exception as error:  # the onnx package raises any kind for a damaged graph
            raise ModelSetError(f"{path} is no ONNX file that can be read: {error}") from error
    try:
        network = import_network(path, options, made)
    except (RuntimeError, UnicodeDecodeError) as error:  # OpenVINO's, in any step
        raise ModelSetError(f"OpenVINO cannot take {path}: {last_line(error)}") from error
    compared = doubt_by_comparison(made or path, network, network.options or options)
    return replace(network, doubt="; ".join(filter(None, (network.doubt, compared))) or None)


def import_weights(
    path: Path,
    architecture: str | None,
    num_classes: int,
    runtime: RuntimeName,
    options: FileOptions,
) -> Imported:
    """Read safetensors as a member; see :func:`calibration.sets.convert.import_state`.

    Raises:
        MissingExtraError: torch or torchvision is not installed.
        ModelSetError: ``architecture`` is None, or the weights do not fit it.
    """
    if runtime != "openvino":
        raise ModelSetError(f"{path} is weights alone: openvino takes it, not {runtime}")
    if architecture is None:
        how = "--architecture NAME=resnet50 or another of torchvision's"
        raise ModelSetError(f"{path} is weights alone: say whose, {how}")
    with needs_extra("train", f"models add of {path.name}"):
        from calibration.sets.convert import import_state
    return import_state(path, architecture, num_classes, options)


@dataclass(frozen=True)
class Finish:
    """The layers appended to a network's output: a missing softmax or sigmoid, and classes."""

    task: Task
    ending: Ending | None = None
    classes: ClassMap | None = None  # None: its own
    # Of a network with one number an image: it is the probability of the second class, or a logit.
    single: Literal["score", "logit"] | None = None

    @property
    def shares_one(self) -> bool:
        """Whether the probabilities of the selected classes must be rescaled to sum to 1."""
        return self.classes is not None and self.ending is None and self.task == "classification"


Make = Callable[[Finish], Imported]


def tried(
    make: Make, path: Path, options: FileOptions, own: Own | None, *, is_single: bool = False
) -> Imported:
    """Make the file, run it on images, and append softmax or a sigmoid if it ends in logits.

    ``own`` is what its graph ends in. Raises :class:`ModelSetError` if its runtime cannot run it,
    or its rows do not fit its task.
    """
    task = task_of(path, options.outputs, options.task, own, is_single=is_single)
    plain = Finish(task)
    if is_single:
        is_score = is_probability(options.outputs, own)
        plain, own = replace(plain, single="score" if is_score else "logit"), None
    made = make(plain)
    ending = missing_ending(_answers(made, path), path, options.outputs, task, own)
    if ending is not None:
        made = make(replace(plain, ending=ending))
    check_numbers(_answers(made, path, is_probabilities=True), path)
    if (classes := options.classes) is None or classes.own == classes.wanted:
        return made
    classes.check_fits(made.num_classes, path)
    return make(replace(plain, ending=ending, classes=classes))


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


def doubt_by_comparison(path: Path, made: Imported, options: FileOptions) -> str | None:
    """Return how far the two runtimes' answers differ, or why that is unknown; None if equal.

    Both compute the operators in the file, and differ if an operator is ambiguous or a runtime is
    wrong. Only labelled images can show which is right. ``path`` is the file that both read.
    """
    if path.suffix != ONNX or find_spec("onnx") is None or find_spec("onnxruntime") is None:
        return None
    from calibration.sets.onnx_graph import import_onnx

    assert made.answers is not None
    images = trial_images(NUM_ASKED, (*sides_of(made.form.size), 3))
    try:
        other = answers_of(import_onnx(path, options), path, images)
    except Exception as error:  # ONNX Runtime may lack operators, or fail in a way of its own
        return f"its answers were not compared with ONNX Runtime's: {error}"
    difference = float(np.abs(made.answers - other).max())
    if difference <= SAID:
        return None
    num_others = int((made.answers.argmax(1) != other.argmax(1)).sum())
    classes = f", and so another class for {num_others} of {NUM_ASKED}" if num_others else ""
    return (
        f"OpenVINO and ONNX Runtime differ by {difference:.3f} in a probability on generated images"
        f"{classes}: evaluate it on both (--runtime NAME=onnxruntime)"
    )
