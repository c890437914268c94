"""Folds preprocessing and softmax or sigmoid into an exported program, for a member on PyTorch.

A ``.pt2`` is read as :mod:`models.runtimes.torch_archive` reads it, never by ``torch.export.load``;
what is written has neither sample inputs (a pickle) nor stack traces with their paths.
"""

import io
import json
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from calibration.sets.fold import Normalisation
from calibration.sets.runtimes.imported_file import (
    FileOptions,
    Finish,
    ImportedFile,
    layout_and_size,
    num_classes_of,
    tried,
)
from models.errors import ModelSetError
from models.runtimes.torch_archive import read_archive
from models.runtimes.torch_arguments import DTYPES
from models.runtimes.torch_program import Program

MAX_BATCH = 4096
LEAST = 1e-12  # a probability, before its logarithm


class _Graph(torch.nn.Module):  # type: ignore[misc]
    """A program with its weights as buffers, so that it can be exported again."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self._program, self._names = program, list(program.tensors)
        for index, tensor in enumerate(program.tensors.values()):
            self.register_buffer(f"tensor_{index}", tensor)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tensors = {name: getattr(self, f"tensor_{i}") for i, name in enumerate(self._names)}
        return self._program(images, tensors)


class Folded(torch.nn.Module):  # type: ignore[misc]
    """uint8 (N, H, W, 3) BGR to float32 (N, C): preprocessing, a network, classes, its ending."""

    def __init__(
        self, network: torch.nn.Module, how: Normalisation, layout: str, finish: Finish
    ) -> None:
        super().__init__()
        self.network, self.is_rgb, self.layout = network, how.color_order == "RGB", layout
        self.register_buffer("mean", torch.tensor(how.mean))
        self.register_buffer("scale", torch.tensor(how.scale))
        self.finish = finish
        if finish.classes is not None:
            self.register_buffer("places", torch.tensor(finish.classes.positions))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        images = pixels.flip(3) if self.is_rgb else pixels
        images = (images.float() - self.mean) / self.scale
        if self.layout == "NCHW":
            images = images.permute(0, 3, 1, 2).contiguous()
        rows = self.network(images).flatten(1).float()  # (N, C)
        if self.finish.classes is not None:
            rows = rows.index_select(1, self.places)
        if self.finish.shares_one:  # softmax(log p) is p / sum(p)
            return torch.softmax(rows.clamp(min=LEAST).log(), 1)
        if self.finish.ending is None:
            return rows
        return torch.softmax(rows, 1) if self.finish.ending == "softmax" else torch.sigmoid(rows)


def import_program(path: Path, options: FileOptions) -> ImportedFile:
    """Read a classifier's ``.pt2`` as a member's file for PyTorch.

    Raises:
        ModelSetError: no .pt2 of one float image in and one row of classes out, or more than a
            network; the message says what is.

    """
    program = Program(read_archive(path))
    sides = tuple(side.get("as_int") for side in program.input["sizes"])
    told = f"{path} takes {DTYPES.get(program.input['dtype'])} {_told(sides)}"
    if program.input["dtype"] != FLOAT32:
        raise ModelSetError(f"{told}; a member takes float32: export it again as that")
    layout, size, batch = layout_and_size(sides, told, options)
    given = tuple(side.get("as_int") for side in program.output["sizes"])
    num_classes = num_classes_of(given, f"{path} gives {_told(given)}")
    _check_numbers(program, path)
    make = partial(_made, _Graph(program), options, layout, size, batch, num_classes, path)
    has_sigmoid = program.last_operator.startswith("aten.sigmoid")
    return tried(make, path, options, has_sigmoid=has_sigmoid)


FLOAT32 = next(number for number, kind in DTYPES.items() if kind == torch.float32)


def import_module(
    module: torch.nn.Module, size: int, num_classes: int, options: FileOptions, where: Path
) -> ImportedFile:
    """Export a module, float (N, 3, H, W) to (N, C), as a member's file for PyTorch."""
    make = partial(_made, module.eval(), options, "NCHW", size, None, num_classes, where)
    return tried(make, where, options, has_sigmoid=False)


def _told(sides: tuple[int | None, ...]) -> str:
    return "[" + ",".join("?" if side is None else str(side) for side in sides) + "]"


def _check_numbers(program: Program, path: Path) -> None:
    for name, tensor in program.tensors.items():
        if tensor.is_floating_point() and bool(torch.isnan(tensor).any()):
            raise ModelSetError(
                f"{path}: the weights {name} have NaN; its training failed, or the file is damaged"
            )


def _made(
    network: torch.nn.Module,
    options: FileOptions,
    layout: str,
    size: int,
    batch: int | None,
    num_classes: int,
    path: Path,
    finish: Finish,
) -> ImportedFile:
    folded = Folded(network, options.normalisation, layout, finish)
    num = num_classes if finish.classes is None else len(finish.classes.wanted)
    content = exported(folded.eval(), size, batch, path)
    return ImportedFile("torch", content, size, num, "FP16", batch, finish.task)


def exported(module: torch.nn.Module, size: int, batch: int | None, where: Path) -> bytes:
    """Return a module that takes uint8 (N, size, size, 3) as the bytes of a .pt2.

    Raises:
        ModelSetError: torch.export cannot, or only for one batch size.

    """
    example = torch.zeros(batch or 2, size, size, 3, dtype=torch.uint8)
    shapes = None if batch else ({0: torch.export.Dim("batch", min=1, max=MAX_BATCH)},)
    written = io.BytesIO()
    try:
        with torch.no_grad():
            program = torch.export.export(module, (example,), dynamic_shapes=shapes)
        torch.export.save(program, written)
    except Exception as error:  # torch raises many kinds; all mean the same here
        told = str(error).strip().partition("\n")[0]
        raise ModelSetError(
            f"{where} cannot be exported for {'any' if batch is None else batch} images of {size} "
            f"px: {told}"
        ) from error
    return _stripped(written.getvalue())


def _stripped(content: bytes) -> bytes:
    """Leave out what running needs not: sample inputs, which are a pickle, and stack traces."""
    written = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as before, zipfile.ZipFile(written, "w") as after:
        for name in before.namelist():
            if "/sample_inputs/" in name:
                continue
            entry = before.read(name)
            if "/models/" in name and name.endswith(".json"):
                program: dict[str, Any] = json.loads(entry)
                for node in program["graph_module"]["graph"]["nodes"]:
                    node["metadata"] = {}
                entry = json.dumps(program).encode()
            after.writestr(zipfile.ZipInfo(name), entry)
    return written.getvalue()
