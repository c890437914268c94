"""Checks a whole TorchScript file, as data: archive, code, and the module that its pickle holds."""

import ast
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from models.runtimes.torchscript.archive import (
    OWN_EXTRA,
    PICKLES,
    TRACED_INPUTS,
    ScriptArchive,
    opened_script,
)
from models.runtimes.torchscript.errors import ScriptError
from models.runtimes.torchscript.functions import check_functions
from models.runtimes.torchscript.pickled import read_pickle
from models.runtimes.torchscript.rewritten import rewritten
from models.runtimes.torchscript.source import Source, dotted, read_source
from models.runtimes.torchscript.values import Instance, Tagged, Tensor, TypedList, tensors_in

LISTED = {"int": "int", "double": "float", "bool": "bool", "tensor": "Tensor"}
FLOATS = {"torch.FloatStorage": "<f4", "torch.DoubleStorage": "<f8", "torch.HalfStorage": "<f2"}
NUMBERS = {"bool": bool, "int": int, "float": float, "str": str}


@dataclass(frozen=True)
class CheckedScript:
    """A TorchScript file of which nothing but computing is left."""

    path: Path
    content: io.BytesIO  # the archive, written anew: what PyTorch may open
    extra: bytes | None  # extra/tandem.json
    example_sides: tuple[int, ...] | None  # of the image it was traced with, if the file tells
    nan: str | None  # the first float tensor with NaN, by its place in the module


def checked_script(
    path: Path, extra: bytes | None = None, *, is_for_import: bool = False
) -> CheckedScript:
    """Read a TorchScript file, check all of it, and write it anew.

    Args:
        path: the file.
        extra: what its ``extra/tandem.json`` is to be; None: what it is.
        is_for_import: whether to look for NaN and for what it was traced with.

    Raises:
        ScriptError: it is damaged, or has what no network of one image and one row needs.

    """
    with opened_script(path) as archive:
        source = read_source(path, archive.code)
        check_functions(source)
        pickles = {name.removesuffix(".pkl"): read_pickle(archive, name) for name in PICKLES}
        _check_module(source, pickles["data"])
        _check_constants(source, pickles["constants"])
        if extra is None and OWN_EXTRA in archive.entries:
            extra = archive.read(OWN_EXTRA)
        content = rewritten(archive, source, pickles, extra)
        if not is_for_import:
            return CheckedScript(path, content, extra, None, None)
        return CheckedScript(path, content, extra, _example(archive), _nan(archive, pickles))


def _check_module(source: Source, found: Any) -> None:
    if not isinstance(found, Instance):
        raise ScriptError(f"{source.path} is damaged: data.pkl holds a {type(found).__name__}")
    _check_instances(source, found)
    methods = source.classes[found.name].methods
    if (forward := methods.get("forward")) is None:
        raise source.refused(f"{found.name} has no method forward")
    arguments = forward.args.args[1:]
    if len(arguments) - len(forward.args.defaults) > 1 or not arguments:
        names = ", ".join(argument.arg for argument in arguments)
        raise source.refused(
            f"it has {len(arguments)} inputs ({names}); a member has one image in and one row of "
            "classes out"
        )
    if forward.returns is None or dotted(forward.returns) != "Tensor":
        told = "nothing" if forward.returns is None else ast.unparse(forward.returns)[:80]
        raise source.refused(f"it gives {told}; a member has one output, a Tensor")


def _check_instances(source: Source, root: Instance) -> None:
    """Check that every object has the attributes of its class, each of its type."""
    seen, left, fitting = {id(root)}, [root], set[tuple[int, int]]()
    while left:
        instance = left.pop()
        if (script_class := source.classes.get(instance.name)) is None:
            raise source.refused(f"data.pkl has a {instance.name}, which its code does not define")
        state = instance.state or {}
        if differing := state.keys() ^ script_class.attributes.keys():
            raise ScriptError(
                f"{source.path} is damaged: {instance.name} has or lacks {min(differing)!r}"
            )
        for name, kind in script_class.attributes.items():
            if not _fits(state[name], kind, fitting):
                raise ScriptError(
                    f"{source.path} is damaged: {instance.name}.{name} is no {ast.unparse(kind)}"
                )
            part = state[name]
            if isinstance(part, Instance) and id(part) not in seen:
                seen.add(id(part))
                left.append(part)


def _fits(value: Any, kind: ast.expr, fitting: set[tuple[int, int]]) -> bool:
    """Whether a value of the pickle is of a type; ``fitting`` has those that were looked at."""
    if isinstance(kind, ast.Subscript):
        pair = (id(value), id(kind))  # a list may be in many others
        if pair not in fitting and not _fits_generic(value, kind, fitting):
            return False
        fitting.add(pair)
        return True
    name = dotted(kind)
    if name == "Tensor":
        return isinstance(value, Tensor)
    if name in NUMBERS:
        return type(value) is NUMBERS[name]
    if isinstance(value, Instance):
        return value.name == name
    return value is None and name in (None, "NoneType", "None")


def _fits_generic(value: Any, kind: ast.Subscript, fitting: set[tuple[int, int]]) -> bool:
    name = dotted(kind.value) or ""
    parts = kind.slice.elts if isinstance(kind.slice, ast.Tuple) else [kind.slice]
    if name == "Optional":
        return value is None or _fits(value, parts[0], fitting)
    if name == "Tuple":
        is_long = isinstance(value, tuple) and len(value) == len(parts)
        return is_long and all(_fits(v, p, fitting) for v, p in zip(value, parts, strict=True))
    if isinstance(value, TypedList):
        of = ast.Name(LISTED[value.kind])
        is_listed = name == "List" and dotted(parts[0]) == of.id
        return is_listed and all(_fits(v, of, fitting) for v in value.values)
    if not isinstance(value, Tagged) or value.kind.replace(" ", "") != _plain(kind):
        return False
    if name == "List" and isinstance(value.value, list):
        return all(_fits(v, parts[0], fitting) for v in value.value)
    if name == "Dict" and isinstance(value.value, dict):
        return all(_fits(part, parts[0], fitting) for part in value.value) and all(
            _fits(part, parts[1], fitting) for part in value.value.values()
        )
    return False


def _plain(kind: ast.expr) -> str:
    return ast.unparse(kind).replace(" ", "")


def _check_constants(source: Source, found: Any) -> None:
    if not isinstance(found, tuple) or not all(isinstance(value, Tensor) for value in found):
        raise source.refused("constants.pkl has something else than tensors")


def _example(archive: ScriptArchive) -> tuple[int, ...] | None:
    """Return the sides of the one tensor that the module was traced with."""
    name = f"{TRACED_INPUTS}.pkl"
    if name not in archive.entries:
        return None
    found = [tensor.sides for _, tensor in tensors_in(read_pickle(archive, name))]
    return found[0] if len(found) == 1 else None


def _nan(archive: ScriptArchive, pickles: dict[str, Any]) -> str | None:
    seen: set[str] = set()
    for folder, value in pickles.items():
        for name, tensor in tensors_in(value):
            kind, entry = tensor.storage.kind, f"{folder}/{tensor.storage.key}"
            if kind not in FLOATS or entry in seen:
                continue
            seen.add(entry)
            if np.isnan(np.frombuffer(archive.read(entry), FLOATS[kind])).any():
                return name if folder == "data" else f"CONSTANTS.c{name}"
    return None
