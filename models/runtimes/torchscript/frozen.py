"""Loads a checked TorchScript module into PyTorch, freezes it, and looks at what is left.

Freezing puts weights and functions in their places: one graph of operators. It must be on the
allow-list once more, keep nothing between runs, and be of a module in evaluation mode.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from models.runtimes.torch_batches import last_line
from models.runtimes.torchscript.checked import CheckedScript
from models.runtimes.torchscript.errors import INSTEAD, ScriptError
from models.runtimes.torchscript.operators import FROZEN, RANDOM

logger = logging.getLogger(__name__)
OF_THE_LANGUAGE = frozenset(
    f"prim::{name}"
    for name in [
        *("Constant", "ListConstruct", "ListUnpack", "TupleConstruct", "TupleUnpack"),
        *("DictConstruct", "If", "Loop", "RaiseException", "Uninitialized", "unchecked_cast"),
        *("NumToTensor", "TupleIndex", "device", "dtype", "is_nested", "requires_grad", "type"),
        *("layout", "shape", "min", "max", "abs"),
    ]
)
VIEWS = frozenset(
    f"aten::{name}"
    for name in [
        *("alias", "chunk", "contiguous", "detach", "diagonal", "expand", "expand_as", "flatten"),
        *("movedim", "narrow", "permute", "reshape", "select", "slice", "split", "squeeze", "t"),
        *("to", "transpose", "unbind", "unflatten", "unsqueeze", "view", "view_as"),
    ]
)
TRAINING_INPUT = {"aten::batch_norm": 5, "aten::dropout": 2, "aten::dropout_": 2}


def loaded_module(script: CheckedScript) -> torch.jit.ScriptModule:
    """Load what was written anew, as a module in evaluation mode.

    Raises:
        ScriptError: this PyTorch cannot.

    """
    with _told(script, "load"):
        return torch.jit.load(script.content, map_location="cpu").eval()


def frozen_module(script: CheckedScript, loaded: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
    """Return a loaded module frozen, its graph checked; ``loaded`` stays as it is.

    Raises:
        ScriptError: it is in training mode, keeps state, or runs what is not on the allow-list.

    """
    with _told(script, "freeze"):
        module: torch.jit.ScriptModule = torch.jit.freeze(loaded)
    for node in _nodes(module.graph):
        _check_node(script, node)
    return module


def last_operator(module: torch.jit.ScriptModule) -> str:
    """Return the operator of a frozen module's output, as ``aten::sigmoid``; views left out."""
    node = next(module.graph.outputs()).node()
    while str(node.kind()) in VIEWS:
        node = next(node.inputs()).node()
    return str(node.kind())


def optimized_module(
    script: CheckedScript, loaded: torch.jit.ScriptModule, example: torch.Tensor
) -> torch.jit.ScriptModule:
    """Return a loaded module frozen, with oneDNN's convolutions where PyTorch can do that.

    Args:
        script: the file.
        loaded: its module.
        example: images that it takes. With some sides oneDNN's layers are found to lack something
            only when they run, as AlexNet's pooling at 64 px.

    Raises:
        ScriptError: as :func:`frozen_module`.

    """
    module = frozen_module(script, loaded)
    try:
        with _quiet(), torch.inference_mode():
            optimized: torch.jit.ScriptModule = torch.jit.optimize_for_inference(module)
            optimized(example)
            return optimized
    except Exception as error:  # torch raises many kinds; all mean the same here
        told = last_line(error)
        logger.warning("%s is not optimised for inference, only frozen: %s", script.path, told)
        return frozen_module(script, loaded)  # anew: what was to be optimised has been changed


@contextmanager
def _told(script: CheckedScript, what: str) -> Iterator[None]:
    try:
        with _quiet():
            yield
    except Exception as error:  # torch raises many kinds; all mean the same here
        told = f"PyTorch {torch.__version__} cannot {what} {script.path}"
        raise ScriptError(f"{told}: {last_line(error)}. {INSTEAD}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch.jit is not developed any more
        yield


def _nodes(block: Any) -> Iterator[Any]:
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _nodes(inner)


def _check_node(script: CheckedScript, node: Any) -> None:
    kind = str(node.kind())
    space, _, name = kind.partition("::")
    if _is_training(node, kind, name):
        raise ScriptError(
            f"{script.path} is in training mode ({kind}): call .eval() before it is traced or "
            "scripted, and save it again"
        )
    if (changed := _changed(node, kind, name)) is not None:
        raise ScriptError(
            f"{script.path} changes {changed} as it runs, so an answer would depend on those "
            f"before it. {INSTEAD}"
        )
    if kind not in OF_THE_LANGUAGE and not (space == "aten" and name in FROZEN):
        raise ScriptError(
            f"{script.path} runs {kind}, which is not among the operators of networks. {INSTEAD}"
        )


def _changed(node: Any, kind: str, name: str) -> str | None:
    """Return what of a module a node changes: an attribute, or weights in place."""
    if kind in ("prim::SetAttr", "prim::GetAttr"):  # those that nothing changes are constants now
        return repr(node.s("name"))
    if not name.endswith("_") or name.endswith("__"):
        return None
    changed = next(node.inputs()).node()
    while str(changed.kind()) in VIEWS:
        changed = next(changed.inputs()).node()
    return "its weights" if str(changed.kind()) == "prim::Constant" else None


def _is_training(node: Any, kind: str, name: str) -> bool:
    if (place := TRAINING_INPUT.get(kind)) is None:
        return name in RANDOM
    return list(node.inputs())[place].toIValue() is not False
