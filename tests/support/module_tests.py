"""Finds the test files of a module: ``python -m tests.support.module_tests app/graph/members.py``.

They are in the folder of its package below tests/unit: the files named like the module, and those
that import it. If there are none, any test file that imports it counts. ELSEWHERE names the files
of modules that no test imports.
"""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "tests/unit"
PACKAGES = ("app", "models", "calibration", "client/tandem_client")
ELSEWHERE = {  # what no test imports, with the tests that run it, below tests/unit
    "app/graph/ensemble.py": ("graph",),
    "app/graph/served_models.py": ("http/test_open_inference.py",),
    "calibration/commands/fetch.py": ("calibration/test_imagenet.py",),
    "calibration/sets/ending.py": ("calibration/sets/test_add_multi_label.py",),
    "calibration/sets/onnx_graph.py": ("calibration/sets/test_add_runtimes.py",),
}


def modules() -> list[str]:
    """Return the modules of the product that define a function or a class."""
    every = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return sorted(
        str(path.relative_to(ROOT)) for path in every if "_pb2" not in path.name and _defines(path)
    )


def tests_of(module: str) -> list[str]:
    """Return the test files of a module, those named like it first; paths from the root."""
    if module in ELSEWHERE:
        paths = ((UNIT / name).resolve() for name in ELSEWHERE[module])
        return [str(test.relative_to(ROOT)) for test in paths]
    path = Path(module)
    stem = path.parent.name if path.stem == "__init__" else path.stem
    folder = UNIT / _folder(path)
    named = sorted(folder.rglob(f"test_{stem}.py")) + sorted(folder.rglob(f"test_{stem}_*.py"))
    tests = [*named, *_importing(path, folder)] or _importing(path, ROOT / "tests")
    return [str(test.relative_to(ROOT)) for test in dict.fromkeys(tests)]


def _importing(module: Path, folder: Path) -> list[Path]:
    parts = module.relative_to("client") if module.parts[0] == "client" else module
    dotted = ".".join(parts.with_suffix("").parts).removesuffix(".__init__")
    return [test for test in sorted(folder.rglob("test_*.py")) if dotted in _imports(test)]


def _folder(module: Path) -> str:
    match module.parts:
        case ("app", package, _, *_):
            return package
        case ("client", *_):
            return "client"
        case ("app" | "models" | "calibration" as package, _, *_):
            return package
    raise ValueError(f"{module} is in no package: name it from the project's root")


@cache
def _imports(test: Path) -> frozenset[str]:
    return frozenset(_imported(ast.parse(test.read_text("utf-8"))))


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _defines(path: Path) -> bool:
    body = ast.parse(path.read_text("utf-8")).body
    return any(isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) for n in body)


def main(arguments: list[str]) -> None:
    for module in arguments:
        tests = tests_of(module)
        if not tests:
            sys.exit(f"{module} has no test: add tests/unit/{_folder(Path(module))}/test_...py")
        print("\n".join(tests))


if __name__ == "__main__":
    main(sys.argv[1:])
