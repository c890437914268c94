"""Makes networks with a built-in batch size take any number of images, if the graph allows it.

TFLite networks, and many others, have a built-in batch size of one: their input is [1, H, W, 3],
and a reshape makes [1, C]. These reshapes are changed to keep the number of images. A network whose
graph does not allow that keeps its batch size.
"""

from pathlib import Path
from typing import Literal

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from models.ensemble import Probabilities
from models.errors import ModelSetError
from models.golden import NUM_KEPT, relative_differences
from models.record import Precision
from models.runtime import CompiledNetwork, RuntimeOptions, fixed_batch, last_line
from models.runtimes.interface import LoadedNetwork

TensorLayout = Literal["NCHW", "NHWC"]
NUM_TRIED = 4  # images in a trial batch
# The relative difference allowed between a batch and single images: kernels for different sizes
# round differently, so that a quantised network may answer a step of 1/256 more or less.
TOLERANCE, FLOAT_TOLERANCE = 0.1, 0.01


def set_shape(
    model: ov.Model, path: Path, layout: TensorLayout, size: int, batch: int | None
) -> None:
    """Let the network take ``batch`` images (None: any number) of ``size`` pixels.

    Raises:
        ModelSetError: it cannot take them, or does not answer each of them.

    """
    number = -1 if batch is None else batch
    shape = [number, 3, size, size] if layout == "NCHW" else [number, size, size, 3]
    try:
        model.reshape(shape)
        out = model.output().partial_shape
    except RuntimeError as error:
        raise ModelSetError(f"{path} cannot take {size} px: {last_line(error)}") from error
    if out.rank.is_dynamic:
        raise ModelSetError(
            f"{path} answers in a shape that changes with the number of images: export it again "
            "with a squeeze of named dimensions, or none"
        )
    if batch is None and len(out) and out[0].is_static:
        raise ModelSetError(
            f"{path} answers {out} whatever the number of images: export it again so that it "
            "answers each"
        )


def check_rows(model: ov.Model, path: Path) -> None:
    """Check that four images get four rows: a flatten to a fixed width makes more of larger images.

    Raises:
        ModelSetError: the number of rows differs.

    """
    number = fixed_batch(model) or NUM_TRIED
    count = "four" if number == NUM_TRIED else number
    trial = model.clone()
    try:
        trial.reshape([number, *list(model.input().partial_shape)[1:]])
        out = trial.output().partial_shape
    except RuntimeError as error:
        raise ModelSetError(f"{path} cannot take {count} images: {last_line(error)}") from error
    if not len(out) or out[0] != number:
        raise ModelSetError(
            f"{path} answers {out} to {count} images: give it the size it was made for"
        )


def keep_images(model: ov.Model, number: int) -> None:
    """Change reshapes to ``number`` rows so that they keep the number of rows."""
    for node in model.get_ordered_ops():
        if node.get_type_name() != "Reshape":
            continue
        pattern = node.input(1).get_source_output().get_node()
        rows = node.input(0).get_partial_shape()
        if pattern.get_type_name() != "Constant" or rows.rank.is_dynamic or not len(rows):
            continue
        sides = pattern.data.ravel().tolist()
        if not sides or sides[0] != number or rows[0] != number:
            continue
        target = np.array([0, *sides[1:]], np.int64)  # 0: as it is
        kept = ops.reshape(node.input_value(0), target, special_zero=True)
        kept.set_friendly_name(node.get_friendly_name())
        for port in node.output(0).get_target_inputs():
            port.replace_source_output(kept.output(0))
    model.validate_nodes_and_infer_types()


def answers_alike(free: ov.Model, fixed: ov.Model) -> bool:
    """Whether a batch of images gets the same answers as its images one by one."""
    one_by_one = CompiledNetwork(fixed, RuntimeOptions())
    number = NUM_TRIED * (one_by_one.fixed_batch or 1)
    batch = CompiledNetwork(free, RuntimeOptions(batch_sizes=(number,)))
    images = trial_images(number, batch.input_shape)
    return rows_alike(one_by_one.predict(images), batch.predict(images))


def rows_alike(
    expected: Probabilities, answered: Probabilities, tolerance: float = TOLERANCE
) -> bool:
    """Whether the likeliest classes of each image, (N, C), have the expected probabilities.

    Differences are relative: with a thousand classes all probabilities are small.
    """
    indices = np.argsort(-expected, axis=1, kind="stable")[:, :NUM_KEPT]
    kept = np.take_along_axis(expected, indices, axis=1)
    off, total = relative_differences(indices, kept, answered)
    return bool((off <= tolerance * total).all())


def check_independent(network: LoadedNetwork, path: Path, precision: Precision) -> None:
    """Compare answers to images alone and in a batch of ``NUM_TRIED``.

    Raises:
        ModelSetError: the answer to an image depends on the others of its batch.

    """
    images = trial_images(NUM_TRIED, network.input_shape)
    together = network.predict(images)
    alone = np.concatenate([network.predict(image[None]) for image in images])
    if not rows_alike(alone, together, TOLERANCE if precision == "INT8" else FLOAT_TOLERANCE):
        difference = float(np.abs(together - alone).max())
        raise ModelSetError(
            f"{path}: the answer to an image depends on the other images of its batch (by "
            f"{difference:.3f} in a probability), and therefore on other callers. It is in "
            "training mode, or mixes its images: export it again after eval(), with every operator "
            "along images"
        )


def trial_images(number: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return fixed images, (number, H, W, 3) uint8: noise, and plain colours.

    Many networks answer all noise alike, by its mean; plain colours get different answers.
    """
    random = np.random.RandomState(0)
    images = random.randint(0, 256, (number, *shape)).astype(np.uint8)
    images[1::2] = random.randint(0, 256, (len(images[1::2]), 1, 1, shape[-1]))
    return images
