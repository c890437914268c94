"""Loads a checked TorchScript module into PyTorch, freezes it, and looks at what is left.

Freezing puts weights and functions in their places: one graph of operators. It must be on the
allow-list once more, keep nothing between runs, and be of a module in evaluation mode.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from models.runtimes.torch_batches import last_line
from models.runtimes.torchscript.checked import CheckedScript
from models.runtimes.torchscript.errors import INSTEAD, ScriptError
from models.runtimes.torchscript.operators import FROZEN, RANDOM

OF_THE_LANGUAGE = frozenset(
    f"prim::{name}"
    for name in [
        *("Constant", "ListConstruct", "ListUnpack", "TupleConstruct", "TupleUnpack"),
        *("DictConstruct", "If", "Loop", "RaiseException", "Uninitialized", "unchecked_cast"),
        *("NumToTensor", "TupleIndex", "device", "dtype", "is_nested", "requires_grad", "type"),
        *("layout", "shape", "min", "max", "abs"),
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


@contextmanager
def _told(script: CheckedScript, what: str) -> Iterator[None]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that torch.jit is not developed any more
            yield
    except Exception as error:  # torch raises many kinds; all mean the same here
        told = f"PyTorch {torch.__version__} cannot {what} {script.path}"
        raise ScriptError(f"{told}: {last_line(error)}. {INSTEAD}") from error


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
    if kind in ("prim::SetAttr", "prim::GetAttr"):
        raise ScriptError(
            f"{script.path} changes {node.s('name')!r} as it runs, so an answer would depend on "
            f"those before it. {INSTEAD}"
        )
    if kind not in OF_THE_LANGUAGE and not (space == "aten" and name in FROZEN):
        raise ScriptError(
            f"{script.path} runs {kind}, which is not among the operators of networks. {INSTEAD}"
        )


def _is_training(node: Any, kind: str, name: str) -> bool:
    if (place := TRAINING_INPUT.get(kind)) is None:
        return name in RANDOM
    return list(node.inputs())[place].toIValue() is not False
