"""Reads TorchScript's pickles as opcodes, and calls nothing: tensors, numbers, objects with state.

An interpreter of the few opcodes that PyTorch's own pickler writes
(torch/csrc/jit/serialization/pickler.cpp). A global is a name, never what it names; which names may
stand where is listed, all else is refused. A tensor must lie within the bytes of its storage:
PyTorch's unpickler does not look.
"""

import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from reprlib import repr as shown  # cut short: a list may hold another one twice, many times over
from typing import Any

from models.runtimes.torchscript.archive import TRACED_INPUTS, ScriptArchive
from models.runtimes.torchscript.errors import INSTEAD, ScriptError
from models.runtimes.torchscript.values import (
    HOLDERS,
    Global,
    Instance,
    Storage,
    Tagged,
    Tensor,
    TypedList,
    parts_of,
)

TENSOR = "torch._utils._rebuild_tensor_v2"
ORDERED = "collections.OrderedDict"
LISTS = {
    f"torch.jit._pickle.build_{kind}list": kind for kind in ("int", "double", "bool", "tensor")
}
TAGGED = "torch.jit._pickle.restore_type_tag"
# Bytes of one element.
STORAGES = {
    "torch.FloatStorage": 4,
    "torch.DoubleStorage": 8,
    "torch.HalfStorage": 2,
    "torch.BFloat16Storage": 2,
    "torch.LongStorage": 8,
    "torch.IntStorage": 4,
    "torch.ShortStorage": 2,
    "torch.CharStorage": 1,
    "torch.ByteStorage": 1,
    "torch.BoolStorage": 1,
}
CLASSES = "__torch__."
MAX_DEPTH = 64  # of objects in objects
MAX_SIDES = 16  # of a tensor


@dataclass
class _Machine:
    archive: ScriptArchive
    folder: str
    stack: list[Any] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)


def read_pickle(archive: ScriptArchive, name: str) -> Any:
    """Return what a pickle of the archive holds, as this module's classes.

    Raises:
        ScriptError: it is damaged, refers to a name that is none of a network's, or to bytes that
            are not there.

    """
    machine = _Machine(archive, name.removesuffix(".pkl"))
    try:
        for opcode, argument, _ in pickletools.genops(archive.read(name)):
            if opcode.name == "STOP":
                (found,) = machine.stack
                break
            if (step := STEPS.get(opcode.name)) is None:
                raise _refused(machine, f"the opcode {opcode.name}")
            step(machine, argument)
        _check_depth(found)
    except ScriptError:
        raise
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError) as error:
        told = f"{archive.path} is damaged: {name}: {type(error).__name__} {error}"
        raise ScriptError(told) from error
    return found


def _check_depth(found: Any) -> None:
    """Refuse what is nested too deep, or holds itself."""
    level: dict[int, Any] = {id(found): found}
    for _ in range(MAX_DEPTH):
        level = {
            id(part): part
            for value in level.values()
            if isinstance(value, HOLDERS)
            for _, part in parts_of(value)
        }
        if not level:
            return
    raise ValueError(f"objects are nested more than {MAX_DEPTH} deep")


def _refused(machine: _Machine, what: str) -> ScriptError:
    return ScriptError(
        f"{machine.archive.path}: {machine.folder}.pkl has {what}, which is no part of a network, "
        f"so the file is not loaded. {INSTEAD}"
    )


def _pop_mark(machine: _Machine) -> list[Any]:
    start = machine.marks.pop()
    found = machine.stack[start:]
    del machine.stack[start:]
    return found


def _push_int(machine: _Machine, argument: int) -> None:
    if not -(2**63) <= argument < 2**63:
        raise OverflowError(f"a number of {argument.bit_length()} bits")
    machine.stack.append(argument)


def _push_text(machine: _Machine, argument: str) -> None:
    argument.encode()  # or it is no text
    machine.stack.append(argument)


def _global(machine: _Machine, argument: str) -> None:
    module, _, name = argument.partition(" ")
    full = f"{module}.{name}"
    allowed = {TENSOR, ORDERED, TAGGED, *LISTS, *STORAGES}
    if full not in allowed and not full.startswith(CLASSES):
        raise _refused(machine, f"the global {full!r}")
    machine.stack.append(Global(full))


def _tuple_of(count: int) -> Callable[[_Machine, Any], None]:
    def step(machine: _Machine, _: Any) -> None:
        found = tuple(machine.stack[-count:])
        if len(found) != count:
            raise IndexError("a tuple of more than there is")
        del machine.stack[-count:]
        machine.stack.append(found)

    return step


def _put(machine: _Machine, argument: int) -> None:
    machine.memo[argument] = machine.stack[-1]


def _append(machine: _Machine, _: Any) -> None:
    value = machine.stack.pop()
    _list(machine).append(value)


def _appends(machine: _Machine, _: Any) -> None:
    values = _pop_mark(machine)
    _list(machine).extend(values)


def _list(machine: _Machine) -> list[Any]:
    if not isinstance(found := machine.stack[-1], list):
        raise TypeError("something is appended to what is no list")
    return found


def _set_items(machine: _Machine, _: Any) -> None:
    items, found = _pop_mark(machine), machine.stack[-1]
    if not isinstance(found, dict) or len(items) % 2:
        raise TypeError("keys and values that do not fit")
    for key, value in zip(items[::2], items[1::2], strict=True):
        if not isinstance(key, str | int) or key in found:
            raise TypeError(f"the key {shown(key)} is no text or number, or is there twice")
        found[key] = value


def _set_item(machine: _Machine, argument: Any) -> None:
    machine.marks.append(len(machine.stack) - 2)
    _set_items(machine, argument)


def _new_object(machine: _Machine, _: Any) -> None:
    arguments, kind = machine.stack.pop(), machine.stack.pop()
    if not isinstance(kind, Global) or not kind.name.startswith(CLASSES) or arguments != ():
        raise _refused(machine, f"an object of {shown(kind)}")
    machine.stack.append(Instance(kind.name))


def _build(machine: _Machine, _: Any) -> None:
    state, found = machine.stack.pop(), machine.stack[-1]
    if not isinstance(found, Instance) or found.state is not None:
        raise _refused(machine, f"a state that is set on {type(found).__name__}")
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        raise _refused(machine, f"{found.name} with a state of its own (__setstate__)")
    found.state = state


def _reduce(machine: _Machine, _: Any) -> None:
    arguments, called = machine.stack.pop(), machine.stack.pop()
    name = called.name if isinstance(called, Global) else shown(called)
    if name == TENSOR:
        machine.stack.append(_tensor(machine, *arguments))
    elif name == ORDERED and arguments == ():
        machine.stack.append({})
    elif name in LISTS and len(arguments) == 1 and isinstance(arguments[0], list):
        machine.stack.append(TypedList(LISTS[name], arguments[0]))
    elif name == TAGGED and len(arguments) == 2 and isinstance(arguments[1], str):
        machine.stack.append(Tagged(*arguments))
    else:
        raise _refused(machine, f"a call of {name!r} with {len(arguments)} arguments")


def _storage(machine: _Machine, _: Any) -> None:
    word, kind, key, device, numel = machine.stack.pop()
    if word != "storage" or not isinstance(kind, Global) or kind.name not in STORAGES:
        raise _refused(machine, f"a reference to {shown(word)} of {shown(kind)}")
    if not isinstance(key, str) or not isinstance(device, str) or not _is_count(numel):
        raise TypeError(f"the storage {shown(key)} of {shown(numel)} elements on {shown(device)}")
    there = machine.archive.size_of(machine.folder, key)
    is_there = there is not None and there >= numel * STORAGES[kind.name]
    if not is_there and machine.folder != TRACED_INPUTS:  # whose bytes are left out
        raise ValueError(
            f"{numel} elements of {kind.name} in {machine.folder}/{key}: {there} bytes"
        )
    machine.stack.append(Storage(kind.name, key, numel))


def _tensor(machine: _Machine, *arguments: Any) -> Tensor:
    storage, offset, sides, strides, requires_grad, *hooks = arguments
    if not isinstance(storage, Storage) or any(hook != {} for hook in hooks):
        raise _refused(machine, "a tensor with hooks, or of no storage")
    is_shaped = len(sides) == len(strides) <= MAX_SIDES and _is_count(offset)
    if not is_shaped or not all(_is_count(number) for number in (*sides, *strides)):
        raise ValueError(f"a tensor of {shown(sides)} with strides {shown(strides)}")
    last = sum((side - 1) * stride for side, stride in zip(sides, strides, strict=True))
    if 0 not in sides and offset + last >= storage.numel:
        raise ValueError(f"a tensor of {sides} outside its {storage.numel} elements")
    return Tensor(storage, offset, tuple(sides), tuple(strides), bool(requires_grad))


def _is_count(number: Any) -> bool:
    return type(number) is int and 0 <= number < 2**40


STEPS: dict[str, Callable[[_Machine, Any], None]] = {
    "PROTO": lambda machine, _: None,
    "MARK": lambda machine, _: machine.marks.append(len(machine.stack)),
    "NONE": lambda machine, _: machine.stack.append(None),
    "NEWTRUE": lambda machine, _: machine.stack.append(True),
    "NEWFALSE": lambda machine, _: machine.stack.append(False),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1"), _push_int),
    "BINFLOAT": lambda machine, argument: machine.stack.append(argument),
    "BINUNICODE": _push_text,
    "EMPTY_TUPLE": lambda machine, _: machine.stack.append(()),
    "EMPTY_LIST": lambda machine, _: machine.stack.append([]),
    "EMPTY_DICT": lambda machine, _: machine.stack.append({}),
    "TUPLE": lambda machine, _: machine.stack.append(tuple(_pop_mark(machine))),
    "TUPLE1": _tuple_of(1),
    "TUPLE2": _tuple_of(2),
    "TUPLE3": _tuple_of(3),
    "APPEND": _append,
    "APPENDS": _appends,
    "SETITEM": _set_item,
    "SETITEMS": _set_items,
    "BINPUT": _put,
    "LONG_BINPUT": _put,
    "BINGET": lambda machine, argument: machine.stack.append(machine.memo[argument]),
    "LONG_BINGET": lambda machine, argument: machine.stack.append(machine.memo[argument]),
    "GLOBAL": _global,
    "NEWOBJ": _new_object,
    "BUILD": _build,
    "REDUCE": _reduce,
    "BINPERSID": _storage,
}
