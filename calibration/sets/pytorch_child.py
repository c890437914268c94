"""Loads a PyTorch file and writes it as IR or ONNX, if the result answers as PyTorch does.

Loading runs the file's code, so only the child process of :func:`calibration.sets.files.converted`
may do it. A network's input and output are found by its answers to noise.
"""

import json
import pickle
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import torch

from calibration.sets.files import ConversionTask
from calibration.sets.input import TensorLayout
from calibration.sets.options import Sides, check_ends, input_form
from models.errors import ModelSetError
from models.openvino_network import compile_with

ALIKE = 0.02  # of the largest output value; kernels round differently
F32 = {"INFERENCE_PRECISION_HINT": "f32"}
ANY_BATCH = (2, 1, 3)  # a network that accepts these accepts any number
BUILT_IN = (4, 8, 16, 32, 64)
TRACED_INPUTS = "/traced_inputs.pkl"  # in the archive: the inputs of tracing
# In archives of members from when TorchScript was a runtime: uint8 (N, H, W, 3), with
# preprocessing.
OF_A_SET = "/extra/tandem.json"
# Of a network whose file does not say it, by layout: pictures in colour, then grey ones.
USUAL: dict[TensorLayout, list[Sides]] = {
    "NCHW": [(None, 3, None, None), (None, 1, None, None), (None, None, None)],
    "NHWC": [(None, None, None, 3), (None, None, None, 1)],
    "NHW": [(None, None, None)],
}
SLACK = 1e-3  # of the largest value, between two runs and between batches


def convert(task: ConversionTask) -> None:
    """Load the file, and write it as IR or ONNX, by the suffix of ``task.made``.

    Raises :class:`ModelSetError` if the file is not a classifier, or cannot be converted.
    """
    try:
        module = _program(task) if task.kind == "program" else _script(task)
        expected = module.checked_rows()
        is_ir = task.made.suffix == ".xml"
        answers = _to_ir(module, task) if is_ir else _to_onnx(module, task, expected.shape)
    except ModelSetError:
        raise
    except Exception as error:  # torch and OpenVINO raise many kinds; all mean the same here
        raise ModelSetError(f"{task.path} cannot be converted: {last_line(error)}") from error
    _check_alike(expected, answers, task)


@dataclass(frozen=True)
class LoadedModule:
    """A loaded network with the example that it is converted with."""

    path: Path
    source: Any  # for OpenVINO and ONNX's exporter: ExportedProgram or ScriptModule
    run: Callable[[torch.Tensor], torch.Tensor]
    sides: Sides  # of its input; None: any size
    is_uint8: bool
    example: torch.Tensor

    def checked_rows(self) -> np.ndarray:
        """Return the rows of the example, after comparing runs and batches.

        Raises:
            ModelSetError: the rows change between runs, or with the other images of the batch.
        """
        with torch.inference_mode():
            rows, again = self.run(self.example), self.run(self.example)
            alone = rows[:1] if self.sides[0] is not None else self.run(self.example[:1])
        if not (_is_alike(rows, again) and _is_alike(rows[:1], alone)):
            raise ModelSetError(
                f"{self.path} is in training mode: its answers change from call to call, or with "
                "the other images of a batch. Save it again after module.eval()"
            )
        return np.asarray(rows.numpy())


def _to_ir(module: LoadedModule, task: ConversionTask) -> np.ndarray:
    kind = ov.Type.u8 if module.is_uint8 else ov.Type.f32
    shape = ov.PartialShape([-1 if side is None else side for side in module.sides])
    model = ov.convert_model(module.source, example_input=module.example, input=[(shape, kind)])
    model.reshape(shape)
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
    slack, is_shaped = ALIKE * max(np.abs(expected).max(), 1e-6), expected.shape == answers.shape
    if not (is_shaped and np.allclose(expected, answers, rtol=0, atol=slack)):
        raise ModelSetError(
            f"{task.path} answers otherwise once it is converted: it was made for another PyTorch, "
            "or has operators that are converted wrongly. Export ONNX, and give that"
        )


def _is_alike(first: torch.Tensor, other: torch.Tensor) -> bool:
    largest = float(first.abs().max())
    return bool(torch.allclose(first, other, rtol=0, atol=SLACK * max(1, largest), equal_nan=True))


def _program(task: ConversionTask) -> LoadedModule:
    with task.path.open("rb") as opened:
        program = torch.export.load(opened)
    signature = program.graph_signature
    check_ends(task.path, signature.user_inputs, [str(name) for name in signature.user_outputs])
    (taken,) = (n for n in program.graph.nodes if n.name == signature.user_inputs[0])
    value = taken.meta["val"]
    sides = tuple(side if isinstance(side, int) else None for side in value.shape)
    sides = _sides(task, sides, str(value.dtype))
    is_uint8 = value.dtype == torch.uint8
    if not is_uint8 and value.dtype != torch.float32:
        raise ModelSetError(
            f"{task.path} takes {value.dtype}; a member takes float32: export it again as that"
        )
    example = _noise(sides, 2, is_uint8)
    return LoadedModule(task.path, program, program.module(), sides, is_uint8, example)


def _script(task: ConversionTask) -> LoadedModule:
    module = torch.jit.load(task.path, map_location="cpu")
    with suppress(AttributeError, RuntimeError):  # a frozen one has no mode any more
        module.eval()
    schema = module.forward.schema
    named = [argument.name for argument in schema.arguments[1:] if not argument.has_default_value()]
    check_ends(task.path, named, [returned.name or "unnamed" for returned in schema.returns])
    if (output := str(schema.returns[0].type)) != "Tensor":
        raise ModelSetError(f"{task.path} gives {output}; a member has one tensor out: trace it")
    is_uint8, traced = _said_by_archive(task)
    forms = [(None, *traced[1:])] if traced else USUAL[task.layout or "NCHW"]
    failed: ModelSetError | None = None
    for form in forms:
        sides = _sides(task, form, "images")
        try:
            batch, example = _batch_of(task.path, module, sides, is_uint8)
            break
        except ModelSetError as error:
            failed = failed or error  # of colour pictures
    else:
        assert failed is not None
        raise failed
    return LoadedModule(task.path, module, module, (batch, *sides[1:]), is_uint8, example)


def _sides(task: ConversionTask, sides: Sides, kind: str) -> Sides:
    """Return the input's sides, with the requested size for an open side."""
    shown = ",".join("?" if side is None else str(side) for side in sides)
    facts = f"{task.path} takes {kind} [{shown}]"
    shape = input_form(sides, facts, task.input_size, task.layout).shape
    return (None if shape[0] < 0 else shape[0], *shape[1:])


def _batch_of(
    path: Path, module: Any, sides: Sides, is_uint8: bool
) -> tuple[int | None, torch.Tensor]:
    taken: dict[int, torch.Tensor] = {}
    first: Exception | None = None
    for batch in (*ANY_BATCH, *BUILT_IN):
        if batch not in ANY_BATCH and (first is None or taken):
            break
        example = _noise(sides, batch, is_uint8)
        try:
            with torch.inference_mode():
                rows = module(example)
        except Exception as error:  # torch raises many kinds; all mean the same here
            first = first or error
            continue
        if rows.dim() and len(rows) == batch:
            taken[batch] = example
    if not taken:
        problem = "other rows than images" if first is None else last_line(first)
        raise ModelSetError(f"{path} does not run on images of {list(sides[1:])}: {problem}")
    if all(batch in taken for batch in ANY_BATCH):
        return None, taken[2]
    return min(taken), taken[min(taken)]


def _noise(sides: Sides, batch: int, is_uint8: bool) -> torch.Tensor:
    """Return fixed images: the network's batch size of them, or ``batch`` if it takes any."""
    shape = (sides[0] or batch, *(int(side or 1) for side in sides[1:]))
    made = torch.Generator().manual_seed(0)
    if is_uint8:
        return torch.randint(0, 256, shape, generator=made, dtype=torch.uint8)
    return torch.randn(shape, generator=made)


def _said_by_archive(task: ConversionTask) -> tuple[bool, Sides]:
    """Return whether TorchScript takes uint8, and the traced input's sides; () if not stored."""
    with zipfile.ZipFile(task.path) as opened:
        for name in opened.namelist():
            if name.endswith(OF_A_SET):
                return True, tuple(json.loads(opened.read(name))["input"])
            if name.endswith(TRACED_INPUTS) and task.input_size is None:
                with opened.open(name) as pickled, suppress(Exception):
                    (sides,) = _Sides(pickled).load()["forward"]
                    return False, tuple(int(side) for side in sides)
    return False, ()


class _Sides(pickle.Unpickler):
    """An unpickler that reads only the sizes of tensors."""

    def persistent_load(self, _: Any) -> None:
        """Skip a tensor's storage."""

    def find_class(self, _: str, name: str) -> Any:
        if name == "_rebuild_tensor_v2":
            return lambda storage, offset, size, *more: tuple(size)
        return lambda *arguments: arguments[0] if arguments else None


def last_line(error: Exception) -> str:
    """Return the last line of a PyTorch error, without TorchScript's place in the code."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].startswith("The following operation failed"):
        return lines[-1]
    return lines[0] if lines else type(error).__name__
