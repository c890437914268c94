"""Compares a network on OpenVINO with the same file on ONNX Runtime, where that is installed."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np

from calibration.sets.batch import trial_images
from calibration.sets.files import ONNX
from calibration.sets.import_network import Imported
from calibration.sets.runtimes.imported_file import FileOptions, answers_of
from models.errors import ModelSetError
from models.runtime import CompiledNetwork, RuntimeOptions

NUM_COMPARED = 8  # images
SAID = 0.01  # a difference of probabilities that is said


def doubt_by_comparison(path: Path, made: Imported, options: FileOptions) -> str | None:
    """Say how far the two runtimes differ, if they do; ``path``: what both read.

    Both compute what the file says, and differ where an operator says it unclearly, or one is
    wrong. Which is right only labelled images can tell.
    """
    if path.suffix != ONNX or find_spec("onnx") is None or find_spec("onnxruntime") is None:
        return None
    from calibration.sets.runtimes.onnx_graph import import_onnx

    network = CompiledNetwork(made.model, RuntimeOptions(batch_sizes=(1,)))
    images = trial_images(NUM_COMPARED, network.input_shape)
    own = np.concatenate([network.predict(image[None]) for image in images])
    try:
        other = answers_of(import_onnx(path, options), path, images)
    except ModelSetError:  # it has operators that ONNX Runtime lacks, or is not taken there
        return None
    difference = float(np.abs(own - other).max())
    if difference <= SAID:
        return None
    num_others = int((own.argmax(1) != other.argmax(1)).sum())
    classes = f", and so another class for {num_others} of {NUM_COMPARED}" if num_others else ""
    return (
        f"OpenVINO and ONNX Runtime differ by {difference:.3f} in a probability on generated images"
        f"{classes}: evaluate it on both (--runtime NAME=onnxruntime)"
    )
