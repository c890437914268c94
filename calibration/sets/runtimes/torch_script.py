"""Folds preprocessing and softmax or sigmoid into TorchScript, for a member that runs as that.

The file is checked as data before PyTorch opens anything of it, and what is written is a file of
the same kind: traced, frozen, and read by the same check again.
"""

import json
import tempfile
import warnings
from functools import partial
from pathlib import Path

import torch

from calibration.sets.batch import TensorLayout
from calibration.sets.runtimes.imported_file import (
    FileOptions,
    Finish,
    ImportedFile,
    Sides,
    layout_and_size,
    num_classes_of,
    tried,
)
from calibration.sets.runtimes.torch_export import Folded
from models.errors import ModelSetError
from models.runtimes.torch_batches import last_line
from models.runtimes.torchscript.checked import CheckedScript, checked_script
from models.runtimes.torchscript.errors import ScriptError
from models.runtimes.torchscript.frozen import frozen_module, last_operator, loaded_module

ANY_BATCH = (1, 2, 3)  # a network that takes these takes any number
BUILT_IN = (1, 2, 4, 8, 16, 32, 64)


def import_script(path: Path, options: FileOptions) -> ImportedFile:
    """Read a classifier's TorchScript as a member's file.

    Raises:
        ModelSetError: no TorchScript of one float image in and one row of classes out, or more than
            a network; the message says what is.

    """
    script = checked_script(path, is_for_import=True)
    if script.nan is not None:
        raise ModelSetError(
            f"{path}: the weights {script.nan} have NaN; its training failed, or the file is "
            "damaged"
        )
    layout, size, _ = layout_and_size(_sides(script, options), f"{path} takes images", options)
    network = loaded_module(script)
    frozen = frozen_module(script, network)
    batch, given = _batch_and_rows(frozen, path, layout, size)
    told = "[" + ",".join(["?", *map(str, given[1:])]) + "]"
    num_classes = num_classes_of((None, *given[1:]), f"{path} gives {told}")
    make = partial(_made, network, options, layout, size, batch, num_classes, path)
    return tried(make, path, options, has_sigmoid=last_operator(frozen) == "aten::sigmoid")


def _sides(script: CheckedScript, options: FileOptions) -> Sides:
    """Return the input's sides: of the example it was traced with, where the file has kept that.

    TorchScript's types have no sizes; what is left open is the user's to say.
    """
    sides = script.example_sides
    if sides is None or options.input_size is not None:
        return (None, None, None, 3) if options.layout == "NHWC" else (None, 3, None, None)
    return (None, *sides[1:])


def _batch_and_rows(
    network: torch.jit.ScriptModule, path: Path, layout: TensorLayout, size: int
) -> tuple[int | None, tuple[int, ...]]:
    """Return the batch size that is built in, if one is, and the sides of the output."""
    found: dict[int, tuple[int, ...]] = {}
    first: Exception | None = None
    for batch in dict.fromkeys((*ANY_BATCH, *BUILT_IN)):
        if batch not in ANY_BATCH and (first is None or found):
            break
        sides = (batch, 3, size, size) if layout == "NCHW" else (batch, size, size, 3)
        try:
            with torch.inference_mode():
                rows = network(torch.zeros(sides))
        except Exception as error:  # torch raises many kinds; all mean the same here
            first = first or error
            continue
        if rows.dim() and len(rows) == batch:
            found[batch] = tuple(rows.shape)
    if not found:
        told = "other rows than images" if first is None else last_line(first)
        raise ScriptError(f"{path} does not run on float32 images of {size} px ({layout}): {told}")
    fixed = None if all(batch in found for batch in ANY_BATCH) else min(found)
    return fixed, next(iter(found.values()))


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
    facts = {"input": [batch, size, size, 3], "num_classes": num}
    content = scripted(folded.eval(), size, batch, json.dumps(facts).encode(), path)
    return ImportedFile("torchscript", content, size, num, "FP16", batch, finish.task)


def scripted(
    module: torch.nn.Module, size: int, batch: int | None, extra: bytes, where: Path
) -> bytes:
    """Return a module that takes uint8 (N, size, size, 3) as the bytes of a member's file.

    Raises:
        ModelSetError: it cannot be traced, or what comes of it is not taken.

    """
    example = torch.zeros(batch or 2, size, size, 3, dtype=torch.uint8)
    with tempfile.TemporaryDirectory(prefix="tandem-add-") as folder:
        file = Path(folder) / f"{where.stem}.torchscript"
        try:
            with torch.inference_mode(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that torch.jit is not developed any more
                traced = torch.jit.trace(module, example, check_trace=False)
                torch.jit.save(torch.jit.freeze(traced), str(file))
        except Exception as error:  # as above
            told = f"{where} cannot be traced with preprocessing: {last_line(error)}"
            raise ModelSetError(told) from error
        return checked_script(file, extra).content.getvalue()
