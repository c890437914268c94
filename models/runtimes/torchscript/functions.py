"""Checks what the functions of TorchScript's code do: calls of the allow-list, and nothing else.

A name stands for data, a module of the file, or a function of it, and for one kind only within a
function: so it is known what each call calls, although a tensor's operators can be called as its
methods (``x.save(...)``), too.
"""

import ast
from dataclasses import dataclass, field

from models.runtimes.torchscript.operators import BUILTINS, OPERATORS, PRIMITIVES
from models.runtimes.torchscript.source import Source, check_constant, check_type, dotted, is_plain

DATA = ""  # a tensor, a number, a text, or a list of them
RESERVED = BUILTINS | {"torch", "ops", "CONSTANTS", "__torch__", "getattr", "inf", "nan"}
# Steps of the whole network, functions put in place of their calls: freezing does that.
MAX_INLINED = 2**20


@dataclass
class _Function:
    """One function, while it is checked."""

    source: Source
    name: str
    kinds: dict[str, str] = field(default_factory=dict)  # of names: DATA, a class, or a function
    steps: int = 0
    calls: list[str] = field(default_factory=list)


def check_functions(source: Source) -> None:
    """Check every function and method of the code.

    Raises:
        ScriptError: it calls or reads what is not on the allow-list, or calls itself.

    """
    found: dict[str, _Function] = {}
    for name, node in source.functions.items():
        found[name] = _checked(source, name, node, None)
    for script_class in source.classes.values():
        for method, node in script_class.methods.items():
            name = f"{script_class.name}.{method}"
            found[name] = _checked(source, name, node, script_class.name)
    sizes: dict[str, int] = {}
    for name in found:
        _inlined(name, found, sizes, ())


def _inlined(
    name: str, found: dict[str, _Function], sizes: dict[str, int], callers: tuple[str, ...]
) -> int:
    function = found[name]
    if name in callers or len(callers) > 200:
        raise function.source.refused(f"{name} calls itself")
    if name not in sizes:
        inner = [_inlined(call, found, sizes, (*callers, name)) for call in function.calls]
        sizes[name] = function.steps + sum(inner)
        if sizes[name] > MAX_INLINED:
            raise function.source.refused(f"{name} has more than {MAX_INLINED} steps")
    return sizes[name]


def _checked(source: Source, name: str, node: ast.FunctionDef, of: str | None) -> _Function:
    function, arguments = _Function(source, name), node.args
    is_plain_list = not (arguments.vararg or arguments.kwarg or arguments.kw_defaults)
    if node.decorator_list or not is_plain_list or arguments.posonlyargs:
        raise source.refused(f"{name} is no plain function")
    for default in arguments.defaults:
        check_constant(source, default, name)
    for index, argument in enumerate(arguments.args):
        is_self = of is not None and index == 0
        if not is_self or argument.annotation is not None:
            check_type(source, argument.annotation, name)
        kind = of if is_self else source.class_of(argument.annotation)
        if is_self and source.class_of(argument.annotation) not in (None, of):
            raise source.refused(f"{name} is of another class")
        _bind(function, argument.arg, kind or DATA)
    if node.returns is not None:
        check_type(source, node.returns, name)
    _block(function, node.body)
    return function


def _bind(function: _Function, name: str, kind: str) -> None:
    if name in RESERVED or name.startswith("__"):
        raise function.source.refused(f"{function.name} gives {name!r} another meaning")
    if function.kinds.setdefault(name, kind) != kind:
        raise function.source.refused(f"{function.name} uses {name!r} for a module and for data")


def _block(function: _Function, body: list[ast.stmt]) -> None:
    for statement in body:
        function.steps += 1
        _statement(function, statement)


def _statement(function: _Function, node: ast.stmt) -> None:
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        _assign(function, node.targets[0], _kind(function, node.value))
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
        check_type(function.source, node.annotation, function.name)
        _assign(function, node.target, _kind(function, node.value))
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        _kind(function, node.value)
    elif isinstance(node, ast.Return):
        if node.value is not None:
            _data(function, node.value)
    elif isinstance(node, ast.If):
        _data(function, node.test)
        _block(function, node.body)
        _block(function, node.orelse)
    elif isinstance(node, ast.While) and not node.orelse:
        _data(function, node.test)
        _block(function, node.body)
    elif isinstance(node, ast.For) and not node.orelse and _is_range(node.iter):
        _data(function, node.iter)
        _assign(function, node.target, DATA)
        _block(function, node.body)
    elif not isinstance(node, ast.Pass):
        raise function.source.refused(f"{function.name} has a {type(node).__name__}")


def _is_range(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and dotted(node.func) == "range"


def _assign(function: _Function, target: ast.expr, kind: str) -> None:
    if isinstance(target, ast.Name):
        _bind(function, target.id, kind)
    elif isinstance(target, ast.Tuple) and kind == DATA:
        for part in target.elts:
            _assign(function, part, DATA)
    elif isinstance(target, ast.Attribute) and kind == DATA and _kind(function, target) == DATA:
        if dotted(target.value) != "self":  # BatchNorm counts batches in training
            raise function.source.refused(f"{function.name} changes another module")
    else:
        raise function.source.refused(f"{function.name} assigns to {ast.unparse(target)[:80]}")


def _data(function: _Function, node: ast.expr) -> None:
    if (kind := _kind(function, node)) != DATA:
        raise function.source.refused(f"{function.name} uses {kind} as data")


def _kind(function: _Function, node: ast.expr) -> str:
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
        _data(function, part)
    return DATA


def _name(function: _Function, name: str) -> str:
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


def _attribute(function: _Function, node: ast.Attribute) -> str:
    name = dotted(node) or ""
    root, _, rest = name.partition(".")
    if root == "CONSTANTS" and rest[:1] == "c" and rest[1:].isdigit():
        return DATA
    if name in function.source.functions:
        return name
    if root in RESERVED:
        raise function.source.refused(f"{function.name} reads {name}")
    return _member(function, node.value, node.attr)


def _member(function: _Function, of: ast.expr, attribute: str) -> str:
    """Return the kind of a module's attribute; data has none."""
    owner = function.source.classes.get(_kind(function, of))
    kind = None if owner is None else owner.type_of(attribute)
    if kind is None:
        told = f"{ast.unparse(of)[:80]}.{attribute}"
        raise function.source.refused(f"{function.name} reads {told}, which no module has")
    return function.source.class_of(kind) or DATA


def _call(function: _Function, node: ast.Call) -> str:
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
        _data(function, part)
    return DATA


def _check_listed(function: _Function, name: str, is_listed: bool) -> None:
    if not is_listed:
        raise function.source.refused(
            f"{function.name} calls {name}, which is not among the operators of networks that "
            "TorchScript may call here"
        )


def _getattr(function: _Function, node: ast.Call) -> str:
    """Check ``getattr(self.layers, "0")``: attributes whose names are no identifiers."""
    match node.args:
        case [of, ast.Constant(value=str(attribute))] if not node.keywords:
            return _member(function, of, attribute)
    raise function.source.refused(f"{function.name} calls getattr with a name that it computes")


def _call_of_own(function: _Function, node: ast.Call, given: list[ast.expr]) -> str:
    """Check the call of a function or method of the file."""
    called = node.func
    if isinstance(called, ast.Attribute) and dotted(called) not in function.source.functions:
        owner = function.source.classes.get(_kind_of_owner(function, called.value))
        if owner is None or called.attr not in owner.methods:
            told = f"{function.name} calls {ast.unparse(called)[:80]}"
            raise function.source.refused(f"{told}, which is no method of a module in the file")
        name = f"{owner.name}.{called.attr}"
    else:
        name = _kind(function, called) if isinstance(called, ast.Name | ast.Attribute) else DATA
        if name not in function.source.functions:
            told = f"{function.name} calls {ast.unparse(called)[:80]}"
            raise function.source.refused(f"{told}, which is no function of the file")
    function.calls.append(name)
    for part in given:
        _kind(function, part)  # modules may be handed on: types are checked by PyTorch
    return DATA


def _kind_of_owner(function: _Function, node: ast.expr) -> str:
    name = dotted(node) or ""
    if name.partition(".")[0] == "__torch__":
        return DATA  # a class or function's name, which is called by itself alone
    return _kind(function, node)
