"""A function that reads a single setting takes its value, not all settings."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]


def reads_one(function: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> bool:
    """Whether ``function`` only ever reads one field of its argument ``name``."""
    uses = [node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == name]
    fields = [
        node.attr
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == name
    ]
    return len(uses) == len(fields) and len(set(fields)) == 1 and fields[0] != "model_copy"


def too_wide(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for argument in (*node.args.args, *node.args.kwonlyargs):
                annotation = argument.annotation and ast.unparse(argument.annotation)
                if annotation == "Settings" and reads_one(node, argument.arg):
                    yield node.name


def test_a_function_gets_the_setting_that_it_reads() -> None:
    files = sorted((ROOT / "app").rglob("*.py"))
    assert len(files) > 100
    wide = {f"{path}: {name}" for path in files for name in too_wide(path.read_text("utf-8"))}
    assert not wide


def test_what_reads_one_setting_is_seen() -> None:
    assert list(too_wide("def f(settings: Settings): return settings.cache")) == ["f"]
    assert not list(too_wide("def f(settings: Settings): return g(settings, settings.cache)"))
    assert not list(too_wide("def f(s: Settings): return s.cache, s.streams"))
