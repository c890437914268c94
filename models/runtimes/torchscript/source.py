"""TorchScript's serialised code as Python syntax trees: its classes, functions and types.

The code is Python's syntax (torch/csrc/jit/serialization/python_print.cpp writes it): classes of
modules, whose attributes have types, and functions. Every part must be of a kind that is listed
here and in ``functions``; nothing of it is compiled or run.
"""

import ast
import re
from dataclasses import dataclass, field
from pathlib import Path

from models.runtimes.torchscript.errors import INSTEAD, ScriptError

MAX_DEPTH = 100  # of syntax: PyTorch's own parser recurses without a limit
TYPES = frozenset(
    ["Tensor", "int", "float", "bool", "str", "NoneType", "None", "number", "Device", "Any"]
)
GENERIC = frozenset(["List", "Optional", "Tuple", "Dict", "Final"])
DECLARATIONS = ("__parameters__", "__buffers__", "__annotations__")
OF_CONTAINERS = ("__len__", "__contains__")
RUN_AT_LOAD = ("__setstate__", "__getstate__")
NATIVE = "__torch__.torch.classes."
TEXT = re.compile(r"[\n\t\x20-\x7e]*")


@dataclass
class ScriptClass:
    """A class of the file: a module's attributes by name, and its methods."""

    name: str  # __torch__.torch.nn.modules.conv.Conv2d
    attributes: dict[str, ast.expr] = field(default_factory=dict)  # their types, without constants
    constants: dict[str, ast.expr] = field(default_factory=dict)
    methods: dict[str, ast.FunctionDef] = field(default_factory=dict)

    def type_of(self, attribute: str) -> ast.expr | None:
        """Return the type of an attribute or constant; None: there is no such."""
        return self.attributes.get(attribute, self.constants.get(attribute))


@dataclass
class Source:
    """All code of one file."""

    path: Path
    trees: dict[str, ast.Module]  # by their names in the archive
    classes: dict[str, ScriptClass] = field(default_factory=dict)
    functions: dict[str, ast.FunctionDef] = field(default_factory=dict)

    def refused(self, what: str) -> ScriptError:
        """Return the error of code that does more than compute."""
        return ScriptError(f"{self.path}: {what}, so the file is not loaded. {INSTEAD}")

    def class_of(self, kind: ast.expr | None) -> str | None:
        """Return the class of the file that a type names; None: it is another type."""
        name = None if kind is None else dotted(kind)
        return name if name in self.classes else None


def dotted(node: ast.AST) -> str | None:
    """Return ``a.b.c`` of names and attributes; None: it is something else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return ".".join([node.id, *reversed(parts)])


def read_source(path: Path, code: dict[str, str]) -> Source:
    """Parse the code and read its classes; what functions do is checked by ``functions``.

    Raises:
        ScriptError: it is damaged, or has what no network of modules has.

    """
    source = Source(path, {name: _parsed(path, name, text) for name, text in code.items()})
    found: list[tuple[ScriptClass, ast.ClassDef]] = []
    for name, tree in source.trees.items():
        module = name.removesuffix(".py").replace("/", ".")
        if f"{module}.".startswith(NATIVE):
            raise source.refused(f"{name} stands for classes of PyTorch's own, in C++")
        for node in tree.body:
            full = f"{module}.{getattr(node, 'name', '')}"
            if full in source.classes or full in source.functions:
                raise ScriptError(f"{path} is damaged: it has {full} twice")
            if isinstance(node, ast.ClassDef):
                source.classes[full] = ScriptClass(full)
                found.append((source.classes[full], node))
            elif isinstance(node, ast.FunctionDef):
                source.functions[full] = node
            else:
                raise source.refused(f"{name} has a {type(node).__name__} outside of functions")
    for script_class, definition in found:
        _read_class(source, script_class, definition)
    return source


def _parsed(path: Path, name: str, text: str) -> ast.Module:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ScriptError(f"{path} is damaged: {name}: {type(error).__name__} {error}") from error
    level: list[ast.AST] = [tree]
    for _ in range(MAX_DEPTH):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        if not level:
            return tree
    raise ScriptError(f"{path}: {name} is nested more than {MAX_DEPTH} deep")


def _read_class(source: Source, script_class: ScriptClass, node: ast.ClassDef) -> None:
    name, bases = script_class.name, [dotted(base) for base in node.bases]
    if bases != ["Module"] or node.keywords or node.decorator_list:
        of = ", ".join(str(base) for base in bases) or "nothing"
        raise source.refused(f"the class {name} is a {of}, and only modules are read (trace it)")
    for part in node.body:
        if isinstance(part, ast.FunctionDef):
            _check_method(source, script_class, part)
            script_class.methods[part.name] = part
        elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            check_type(source, part.annotation, name)
            is_constant = part.value is not None
            if is_constant:
                check_constant(source, part.value, name)
            place = script_class.constants if is_constant else script_class.attributes
            place[part.target.id] = part.annotation
        elif isinstance(part, ast.Assign) and len(part.targets) == 1:
            _read_declaration(source, script_class, part)
        elif not isinstance(part, ast.Pass):
            raise source.refused(f"the class {name} has a {type(part).__name__}")


def _check_method(source: Source, script_class: ScriptClass, node: ast.FunctionDef) -> None:
    if node.name in RUN_AT_LOAD:
        raise source.refused(f"{script_class.name}.{node.name} runs code at load")
    if node.name.startswith("__") and node.name not in OF_CONTAINERS:
        raise source.refused(f"{script_class.name} has the method {node.name}")
    if node.name in script_class.methods:
        raise ScriptError(f"{source.path} is damaged: {script_class.name}.{node.name} twice")


def _read_declaration(source: Source, script_class: ScriptClass, part: ast.Assign) -> None:
    """Read ``__parameters__ = ["weight"]`` or ``__annotations__["0"] = TYPE``."""
    (target,) = part.targets
    match target, part.value:
        case ast.Name(id=name), ast.List(elts=values) if name in DECLARATIONS:
            if all(map(_is_text, values)):
                return
        case ast.Subscript(
            value=ast.Name("__annotations__"), slice=ast.Constant(str(name))
        ), kind if is_plain(name):
            check_type(source, kind, script_class.name)
            script_class.attributes[name] = kind
            return
    raise source.refused(f"the class {script_class.name} declares {ast.unparse(target)[:80]}")


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def check_type(source: Source, node: ast.expr | None, where: str) -> None:
    """Raise :class:`ScriptError` unless it is a type of tensors, numbers or the file's classes."""
    if isinstance(node, ast.Constant) and node.value is None:
        return
    name = None if node is None else dotted(node)
    if name in TYPES or name in source.classes:
        return
    if isinstance(node, ast.Subscript) and dotted(node.value) in GENERIC:
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        for part in parts:
            if source.class_of(part) is not None:
                raise source.refused(f"{where} has modules in a {dotted(node.value)}")
            check_type(source, part, where)
        return
    told = "no type" if node is None else f"the type {ast.unparse(node)[:80]}"
    raise source.refused(f"{where} has {told}, which is none of a network's")


def check_constant(source: Source, node: ast.expr | None, where: str) -> None:
    """Raise :class:`ScriptError` unless it is a number, a text, None or a sequence of them."""
    if isinstance(node, ast.List | ast.Tuple):
        for part in node.elts:
            check_constant(source, part, where)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        check_constant(source, node.operand, where)
    elif isinstance(node, ast.Name) and node.id in ("inf", "nan"):
        return
    elif not isinstance(node, ast.Constant) or not is_plain(node.value):
        raise source.refused(f"{where} has the constant {node and ast.unparse(node)[:80]!r}")


def is_plain(value: object) -> bool:
    """Whether a constant is one that TorchScript writes: texts of printable ASCII."""
    if isinstance(value, str):
        return TEXT.fullmatch(value) is not None
    return value is None or isinstance(value, bool | int | float)
