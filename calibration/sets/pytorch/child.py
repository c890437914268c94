"""Loads a PyTorch file in the child process of :mod:`calibration.sets.pytorch.conversion`.

It writes the network as IR or ONNX, if the result answers as PyTorch does.
"""

from typing import Any

import numpy as np
import openvino as ov
import torch

from calibration.sets.pytorch.conversion import ConversionTask
from calibration.sets.pytorch.loaded import LoadedModule, last_line, load_module
from models.errors import ModelSetError
from models.runtime import compile_with

ALIKE = 0.02  # of the largest output value; kernels round differently
F32 = {"INFERENCE_PRECISION_HINT": "f32"}


def convert(task: ConversionTask) -> None:
    """Load the file, and write it as IR or ONNX, by the suffix of ``task.made``.

    Raises:
        ModelSetError: the file is not a classifier, or cannot be converted.

    """
    try:
        module = load_module(task)
        expected = module.checked_rows()
        if task.made.suffix == ".xml":
            answers = _to_ir(module, task)
        else:
            answers = _to_onnx(module, task, expected.shape)
    except ModelSetError:
        raise
    except Exception as error:  # torch and OpenVINO raise many kinds; all mean the same here
        raise ModelSetError(f"{task.path} cannot be converted: {last_line(error)}") from error
    _check_alike(expected, answers, task)


def _to_ir(module: LoadedModule, task: ConversionTask) -> np.ndarray:
    """Write an IR; return its answers to the module's example."""
    kind = ov.Type.u8 if module.is_uint8 else ov.Type.f32
    sides = [-1 if side is None else side for side in module.sides]
    model = ov.convert_model(
        module.source, example_input=module.example, input=[(ov.PartialShape(sides), kind)]
    )
    model.reshape(ov.PartialShape(sides))
    ov.save_model(model, task.made, compress_to_fp16=False)
    return np.asarray(compile_with(model, F32)(module.example.numpy())[0])


def _to_onnx(module: LoadedModule, task: ConversionTask, sides: tuple[int, ...]) -> np.ndarray:
    """Write an ONNX file with output rows of ``sides``; return its answers to the example.

    For TorchScript the exporter leaves the output's sides open.
    """
    import onnx
    import onnxruntime

    more: dict[str, Any] = {"dynamo": True, "external_data": False, "verbose": False}
    if task.kind == "script":
        axes = {"image": {0: "N"}, "rows": {0: "N"}} if module.sides[0] is None else None
        names = {"input_names": ["image"], "output_names": ["rows"]}
        more = {"dynamo": False, "dynamic_axes": axes, **names}
    torch.onnx.export(module.source, (module.example,), str(task.made), **more)
    model = onnx.load(task.made)
    dimensions = model.graph.output[0].type.tensor_type.shape.dim
    for dimension, side in list(zip(dimensions, sides, strict=False))[1:]:
        dimension.dim_value = side
    onnx.save(model, task.made)
    session = onnxruntime.InferenceSession(task.made, providers=["CPUExecutionProvider"])
    (taken,) = session.get_inputs()
    return np.asarray(session.run(None, {taken.name: module.example.numpy()})[0])


def _check_alike(expected: np.ndarray, answers: np.ndarray, task: ConversionTask) -> None:
    if not np.isfinite(expected).all():  # models add reports NaN with a reason
        return
    largest = float(np.abs(expected).max())
    is_alike = expected.shape == answers.shape and np.allclose(
        expected, answers, rtol=0, atol=ALIKE * max(largest, 1e-6)
    )
    if not is_alike:
        raise ModelSetError(
            f"{task.path} answers otherwise once it is converted: it was made for another PyTorch, "
            "or has operators that are converted wrongly. Export ONNX, and give that"
        )
