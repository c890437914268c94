"""Compares a network's answers on OpenVINO and on ONNX Runtime, if that is installed."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np

from calibration.sets.batch import trial_images
from calibration.sets.file_options import FileOptions
from calibration.sets.files import ONNX
from calibration.sets.import_network import NUM_ASKED, Imported
from calibration.sets.runtimes.imported_file import answers_of

SAID = 0.01  # a smaller difference of probabilities is not reported


def doubt_by_comparison(path: Path, made: Imported, options: FileOptions) -> str | None:
    """Return how far the two runtimes' answers differ, or why that is unknown; None if equal.

    Both compute the operators in the file, and differ if an operator is ambiguous or a runtime is
    wrong. Only labelled images can show which is right. ``path`` is the file that both read.
    """
    if path.suffix != ONNX or find_spec("onnx") is None or find_spec("onnxruntime") is None:
        return None
    from calibration.sets.runtimes.onnx_graph import import_onnx

    assert made.answers is not None
    images = trial_images(NUM_ASKED, (made.input_size, made.input_size, 3))
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
