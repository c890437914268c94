"""Checks what the functions of TorchScript's code do, statement by statement.

Assignments, branches and loops of calls: what may be called is in ``expressions``. Functions that
call themselves, or that are more steps than a network when they are put in place of their calls, as
freezing does, are refused.
"""

import ast

from models.runtimes.torchscript.expressions import DATA, Function, bind, check_data, kind_of
from models.runtimes.torchscript.source import Source, check_constant, check_type, dotted

MAX_INLINED = 2**20  # steps of the whole network


def check_functions(source: Source) -> None:
    """Check every function and method of the code.

    Raises:
        ScriptError: it calls or reads what is not on the allow-list, or calls itself.

    """
    found: dict[str, Function] = {}
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
    name: str, found: dict[str, Function], sizes: dict[str, int], callers: tuple[str, ...]
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


def _checked(source: Source, name: str, node: ast.FunctionDef, of: str | None) -> Function:
    function, arguments = Function(source, name), node.args
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
        bind(function, argument.arg, kind or DATA)
    if node.returns is not None:
        check_type(source, node.returns, name)
    _block(function, node.body)
    return function


def _block(function: Function, body: list[ast.stmt]) -> None:
    for statement in body:
        function.steps += 1
        _statement(function, statement)


def _statement(function: Function, node: ast.stmt) -> None:
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        _assign(function, node.targets[0], kind_of(function, node.value))
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
        check_type(function.source, node.annotation, function.name)
        _assign(function, node.target, kind_of(function, node.value))
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        kind_of(function, node.value)
    elif isinstance(node, ast.Return):
        if node.value is not None:
            check_data(function, node.value)
    elif isinstance(node, ast.If):
        check_data(function, node.test)
        _block(function, node.body)
        _block(function, node.orelse)
    elif isinstance(node, ast.While) and not node.orelse:
        check_data(function, node.test)
        _block(function, node.body)
    elif isinstance(node, ast.For) and not node.orelse and _is_range(node.iter):
        check_data(function, node.iter)
        _assign(function, node.target, DATA)
        _block(function, node.body)
    elif not isinstance(node, ast.Pass):
        raise function.source.refused(f"{function.name} has a {type(node).__name__}")


def _is_range(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and dotted(node.func) == "range"


def _assign(function: Function, target: ast.expr, kind: str) -> None:
    if isinstance(target, ast.Name):
        bind(function, target.id, kind)
    elif isinstance(target, ast.Tuple) and kind == DATA:
        for part in target.elts:
            _assign(function, part, DATA)
    elif isinstance(target, ast.Attribute) and kind == DATA and kind_of(function, target) == DATA:
        if dotted(target.value) != "self":  # BatchNorm counts batches in training
            raise function.source.refused(f"{function.name} changes another module")
    else:
        raise function.source.refused(f"{function.name} assigns to {ast.unparse(target)[:80]}")
