"""Checks expressions of TorchScript's code: calls of the allow-list, and nothing else.

A name stands for data, a module of the file, or a function of it, and for one kind only within a
function: so it is known what each call calls, although a tensor's operators can be called as its
methods (``x.save(...)``), too.
"""

import ast
from dataclasses import dataclass, field

from models.runtimes.torchscript.operators import BUILTINS, OPERATORS, PRIMITIVES
from models.runtimes.torchscript.source import Source, check_type, dotted, is_plain

DATA = ""  # a tensor, a number, a text, or a list of them
RESERVED = BUILTINS | {"torch", "ops", "CONSTANTS", "__torch__", "getattr", "inf", "nan"}


@dataclass
class Function:
    """One function, while it is checked."""

    source: Source
    name: str
    kinds: dict[str, str] = field(default_factory=dict)  # of names: DATA, a class, or a function
    steps: int = 0
    calls: list[str] = field(default_factory=list)


def bind(function: Function, name: str, kind: str) -> None:
    """Note what a name stands for, or raise :class:`ScriptError` if it stood for another kind."""
    if name in RESERVED or name.startswith("__"):
        raise function.source.refused(f"{function.name} gives {name!r} another meaning")
    if function.kinds.setdefault(name, kind) != kind:
        raise function.source.refused(f"{function.name} uses {name!r} for a module and for data")


def check_data(function: Function, node: ast.expr) -> None:
    """Raise :class:`ScriptError` unless an expression is data that is computed as it may be."""
    if (kind := kind_of(function, node)) != DATA:
        raise function.source.refused(f"{function.name} uses {kind} as data")


def kind_of(function: Function, node: ast.expr) -> str:
    """Check an expression, and return what it stands for: DATA, a class or a function."""
    if isinstance(node, ast.Name):
        return _name(function, node.id)
    if isinstance(node, ast.Attribute):
        return _attribute(function, node)
    if isinstance(node, ast.Call):
        return _call(function, node)
    if (parts := _parts(node)) is None:
        told = f"{type(node).__name__} ({ast.unparse(node)[:80]})"
        raise function.source.refused(f"{function.name} has a {told}")
    for part in parts:
        check_data(function, part)
    return DATA


def _name(function: Function, name: str) -> str:
    if name in ("inf", "nan"):
        return DATA
    if name not in function.kinds:
        raise function.source.refused(f"{function.name} reads {name!r}, which is nothing")
    return function.kinds[name]


def _parts(node: ast.expr) -> list[ast.expr] | None:
    """Return the parts of an expression that is data if they are; None: it is none."""
    if isinstance(node, ast.Constant) and is_plain(node.value):
        return []
    if isinstance(node, ast.Tuple | ast.List):
        return node.elts
    if isinstance(node, ast.Dict) and None not in node.keys:
        return [*(key for key in node.keys if key is not None), *node.values]
    if isinstance(node, ast.Subscript):
        return [node.value, node.slice]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
        return [node.operand]
    return None


def _attribute(function: Function, node: ast.Attribute) -> str:
    name = dotted(node) or ""
    root, _, rest = name.partition(".")
    if root == "CONSTANTS" and rest[:1] == "c" and rest[1:].isdigit():
        return DATA
    if name in function.source.functions:
        return name
    if root in RESERVED:
        raise function.source.refused(f"{function.name} reads {name}")
    return _member(function, node.value, node.attr)


def _member(function: Function, of: ast.expr, attribute: str) -> str:
    """Return the kind of a module's attribute; data has none."""
    owner = function.source.classes.get(kind_of(function, of))
    kind = None if owner is None else owner.type_of(attribute)
    if kind is None:
        told = f"{ast.unparse(of)[:80]}.{attribute}"
        raise function.source.refused(f"{function.name} reads {told}, which no module has")
    return function.source.class_of(kind) or DATA


def _call(function: Function, node: ast.Call) -> str:
    name = dotted(node.func) or ""
    root, _, rest = name.partition(".")
    given = [*node.args, *(keyword.value for keyword in node.keywords)]
    if any(keyword.arg is None for keyword in node.keywords):
        raise function.source.refused(f"{function.name} calls {name} with **")
    function.steps += 1
    if root == "torch":
        _check_listed(function, name, rest in OPERATORS)
    elif root == "ops":
        space, _, primitive = rest.partition(".")
        _check_listed(function, name, space == "prim" and primitive in PRIMITIVES)
    elif name == "getattr":
        return _getattr(function, node)
    elif name in BUILTINS:
        if name in ("annotate", "uninitialized", "unchecked_cast"):
            kind, *given = node.args
            check_type(function.source, kind, function.name)
            if function.source.class_of(kind) is not None:
                raise function.source.refused(f"{function.name} makes a module of {name}")
    else:
        return _call_of_own(function, node, given)
    for part in given:
        check_data(function, part)
    return DATA


def _check_listed(function: Function, name: str, is_listed: bool) -> None:
    if not is_listed:
        raise function.source.refused(
            f"{function.name} calls {name}, which is not among the operators of networks that "
            "TorchScript may call here"
        )


def _getattr(function: Function, node: ast.Call) -> str:
    """Check ``getattr(self.layers, "0")``: attributes whose names are no identifiers."""
    match node.args:
        case [of, ast.Constant(value=str(attribute))] if not node.keywords:
            return _member(function, of, attribute)
    raise function.source.refused(f"{function.name} calls getattr with a name that it computes")


def _call_of_own(function: Function, node: ast.Call, given: list[ast.expr]) -> str:
    """Check the call of a function or method of the file."""
    called = node.func
    if isinstance(called, ast.Attribute) and dotted(called) not in function.source.functions:
        owner = function.source.classes.get(_kind_of_owner(function, called.value))
        if owner is None or called.attr not in owner.methods:
            told = f"{function.name} calls {ast.unparse(called)[:80]}"
            raise function.source.refused(f"{told}, which is no method of a module in the file")
        name = f"{owner.name}.{called.attr}"
    else:
        name = kind_of(function, called) if isinstance(called, ast.Name | ast.Attribute) else DATA
        if name not in function.source.functions:
            told = f"{function.name} calls {ast.unparse(called)[:80]}"
            raise function.source.refused(f"{told}, which is no function of the file")
    function.calls.append(name)
    for part in given:
        kind_of(function, part)  # modules may be handed on: types are checked by PyTorch
    return DATA


def _kind_of_owner(function: Function, node: ast.expr) -> str:
    name = dotted(node) or ""
    if name.partition(".")[0] == "__torch__":
        return DATA  # a class or function's name, which is called by itself alone
    return kind_of(function, node)
