"""Imports a classifier that OpenVINO reads as a member: uint8 BGR in, probabilities out."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from calibration.sets.fold import Normalisation, fold, with_softmax
from calibration.sets.rewrite import chain_concats
from models.errors import ModelSetError
from models.record import Precision
from models.runtime import CompiledNetwork, RuntimeOptions, check_network, read_network

TensorLayout = Literal["NCHW", "NHWC"]
Outputs = Literal["auto", "logits", "probabilities"]


@dataclass(frozen=True)
class Imported:
    """A folded network and what was found out about it."""

    model: ov.Model
    input_size: int
    num_classes: int
    precision: Precision


def import_network(
    path: Path, input_size: int | None, normalisation: Normalisation, outputs: Outputs = "auto"
) -> Imported:
    """Read an IR or ONNX classifier and fold preprocessing and softmax into it.

    One that takes uint8 [?,H,W,3] is taken as folded already. ``outputs``: auto runs it once and
    sees whether the rows are probabilities.

    Raises:
        ModelSetError: not one image in and one row of classes out; the message says what is.

    """
    model = read_network(path)
    _check_ends(model, path)
    precision: Precision = "INT8" if _is_quantized(model) else "FP16"
    layout, size = _layout_and_size(model, path, input_size)
    _make_batch_dynamic(model, path, layout, size)
    _flatten_output(model)
    if model.input().element_type != ov.Type.u8:
        if precision == "FP16":
            chain_concats(model)
        model = fold(model, size, normalisation, layout)
    (height, width, _), num_classes = check_network(model, str(path))
    _check_rows(model, path)
    if height != width:
        raise ModelSetError(f"{path} takes {height}x{width}; a member takes a square")
    if input_size not in (None, height):
        raise ModelSetError(f"{path} takes {height} px, --input-size says {input_size}")
    if outputs == "logits" or (outputs == "auto" and not _gives_probabilities(model, path)):
        model = with_softmax(model)
    if not _gives_probabilities(model, path):
        raise ModelSetError(
            f"{path} does not give probabilities: rows must be 0..1 and sum to 1; if it ends in "
            "logits, say --outputs logits"
        )
    return Imported(model, height, num_classes, precision)


def _check_ends(model: ov.Model, path: Path) -> None:
    for what, ports in (("inputs", model.inputs), ("outputs", model.outputs)):
        if len(ports) != 1:
            names = ", ".join(port.any_name if port.names else "unnamed" for port in ports)
            raise ModelSetError(
                f"{path} has {len(ports)} {what} ({names}); a member has one image in and one row "
                "of classes out: export it again with that one alone"
            )


def _is_quantized(model: ov.Model) -> bool:
    return any(node.get_type_name() == "FakeQuantize" for node in model.get_ops())


def _layout_and_size(
    model: ov.Model, path: Path, input_size: int | None
) -> tuple[TensorLayout, int]:
    """Find the three channels, and the side in pixels if the network fixes it."""
    shape = model.input().partial_shape
    told = f"{path} takes {model.input().element_type} {shape}"
    if shape.rank.is_dynamic or len(shape) != 4:
        raise ModelSetError(f"{told}; a member takes images, [N,3,H,W] or [N,H,W,3]")
    sides = [d.get_length() if d.is_static else None for d in shape]
    if sides[1] == 3:
        layout: TensorLayout = "NCHW"
        height, width = sides[2:]
    elif sides[3] == 3:
        layout = "NHWC"
        height, width = sides[1:3]
    else:
        raise ModelSetError(f"{told}; no side is 3 channels: a member takes colour images")
    if height != width:
        raise ModelSetError(f"{told}; a member takes squares")
    size = height or input_size
    if size is None:
        raise ModelSetError(f"{told}: its size is open, so say --input-size (224 for ImageNet)")
    return layout, size


def _make_batch_dynamic(model: ov.Model, path: Path, layout: TensorLayout, size: int) -> None:
    shape = [-1, 3, size, size] if layout == "NCHW" else [-1, size, size, 3]
    try:
        model.reshape(shape)
        out = model.output().partial_shape
    except RuntimeError as error:
        raise ModelSetError(
            f"{path} cannot take {size} px: {str(error).splitlines()[-1]}"
        ) from error
    if out.rank.is_dynamic:
        raise ModelSetError(
            f"{path} answers in a shape that changes with the number of images: export it again "
            "with a squeeze of named dimensions, or none"
        )
    if len(out) and out[0].is_static:
        raise ModelSetError(
            f"{path} answers {out} whatever the number of images: its batch size is built in; "
            "export it again with a dynamic batch"
        )


def _flatten_output(model: ov.Model) -> None:
    """Turn (N, C, 1, 1), as some networks end, into (N, C)."""
    out = model.output().partial_shape
    sides = [d.get_length() if d.is_static else None for d in out]
    if len(sides) == 4 and sides[2:] == [1, 1]:
        result = model.output().get_node()
        flat = ops.reshape(result.input_value(0), np.array([0, -1]), special_zero=True)
        result.input(0).replace_source_output(flat.output(0))
        model.validate_nodes_and_infer_types()


def _check_rows(model: ov.Model, path: Path) -> None:
    """Count the rows for four images: a flatten to a built-in width makes more of larger ones."""
    trial = model.clone()
    try:
        trial.reshape([4, *list(model.input().partial_shape)[1:]])
        out = trial.output().partial_shape
    except RuntimeError as error:
        last_line = str(error).strip().splitlines()[-1]
        raise ModelSetError(f"{path} cannot take four images: {last_line}") from error
    if out[0] != 4:
        raise ModelSetError(
            f"{path} answers {out} to four images: give it the size it was made for"
        )


def _gives_probabilities(model: ov.Model, path: Path) -> bool:
    try:
        network = CompiledNetwork(model, RuntimeOptions(batch_sizes=(4,)))
        images = np.random.RandomState(0).randint(0, 256, (4, *network.input_shape))
        rows = network.infer(images.astype(np.uint8))
    except RuntimeError as error:
        last_line = str(error).strip().splitlines()[-1]
        raise ModelSetError(f"OpenVINO cannot run {path} on four images: {last_line}") from error
    return bool(rows.min() >= -1e-4 and np.allclose(rows.sum(axis=1), 1, atol=1e-2))
