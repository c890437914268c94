"""Prints the product's tree, a line for each file: ``python -m tests.support.tree``.

``--check`` fails over the budgets: files and lines of the product, lines of the tests, lines of a
file, and modules that only one other module of their folder imports. The exceptions say why.
"""

import ast
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("app", "models", "calibration", "client/tandem_client")
# Where the code stands. Lines go down, to 42,500 and 60,000 of the tests. What
# watches every process of a service raised them once, what callers may do once more, and teaching
# and erasing once more.
MAX_FILES, MAX_LINES, MAX_TEST_LINES = 160, 54_700, 78_700
SHORTEST, LONGEST = 100, 500  # lines of a file
SHORT = {  # shorter files, and why each is one of its own
    "app/cli/launcher.py": "becomes tandem/__init__.py in a wheel",
    "app/stages/combiner.py": "a stage of the graph, as Decoder and Classifier",
    "calibration/training/average.py": "a command of its own, which the sets' README names",
    "models/errors.py": "every module of models imports it, and app/errors.py builds on it",
}
LONG: dict[str, str] = {}  # longer files, and why each is not two
ONLY_IMPORTER = {  # modules with one importer, in their folder, and why each is a file of its own
    "app.cli.cluster_rows": "imports Ray Data, which classify needs with --address alone",
    "app.graph.members": "the answers of the members; with ensemble.py it has over 600 lines",
    "app.http.open_inference": "the routes of a protocol; with api.py it has over 700 lines",
    "app.http.other_routes": "what the service has next to classifying; too long for api.py",
    "app.launch.deploy": "what Serve is asked to deploy; with its importer it would be too long",
    "app.launch.supervisor": "what serve.py waits for; with it serve.py has over 700 lines",
    "app.launch.run_folder": "must be entered before ray is imported, and so imports none of it",
    "calibration.commands.fetch": "a command; learn makes imagenet with it, if it is not there",
    "calibration.learning.heads": "fits heads and judges them; learn.py puts the set together",
    "calibration.commands.fit": "what evaluate fits; with evaluate.py it has over 500 lines",
    "calibration.ladder.engines": "imports the engines' packages, each when a rung runs it",
    "calibration.sets.onnx_graph": "imports onnx, which only sets for ONNX Runtime need",
    "calibration.sets.pytorch_child": "runs in a process of its own, with torch",
}


def product_files() -> list[Path]:
    """Return the modules of the product, without generated ones and packages' docstrings."""
    every = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    ours = (path for path in every if "_pb2" not in path.name and path.name != "__init__.py")
    return sorted(ours, key=lambda path: (path.parent, path.name))


def num_lines(path: Path) -> int:
    return path.read_text("utf-8").count("\n")


def purpose(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").partition("\n")[0]


def dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[1:] if parts[0] == "client" else parts).removesuffix(".__init__")


def importers() -> dict[str, set[str]]:
    """Return the modules that import each module of the product, also within functions."""
    modules = {dotted(path): path for path in product_files()}
    by_module: dict[str, set[str]] = defaultdict(set)
    packages = [path for package in PACKAGES for path in (ROOT / package).rglob("__init__.py")]
    for path in [*modules.values(), *packages]:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{a.name}" for a in node.names)]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                if name in modules and name != dotted(path):
                    by_module[name].add(dotted(path))
    return by_module


def only_importers() -> dict[str, str]:
    """Return the modules that exactly one module imports, which is of the same folder."""
    return {
        module: next(iter(of))
        for module, of in importers().items()
        if len(of) == 1 and module.rpartition(".")[0] == next(iter(of)).rpartition(".")[0]
    }


def problems() -> list[str]:
    """Return what is over a budget, and exceptions that are none any more."""
    files = {str(path.relative_to(ROOT)): num_lines(path) for path in product_files()}
    total = sum(files.values())
    of_tests = sum(map(num_lines, (ROOT / "tests").rglob("*.py")))
    rows = []
    if len(files) > MAX_FILES:
        rows.append(f"{len(files)} files of the product, the limit is {MAX_FILES}: join some")
    if total > MAX_LINES:
        rows.append(f"{total} lines of the product, the limit is {MAX_LINES}: remove some")
    if of_tests > MAX_TEST_LINES:
        rows.append(f"{of_tests} lines of tests, the limit is {MAX_TEST_LINES}: remove some")
    short = {name for name, lines in files.items() if lines < SHORTEST}
    long = {name for name, lines in files.items() if lines > LONGEST}
    for what, there, named in (
        (f"shorter than {SHORTEST} lines", short, SHORT),
        (f"longer than {LONGEST} lines", long, LONG),
        ("imported by one module of its folder alone", set(only_importers()), ONLY_IMPORTER),
    ):
        rows += [
            f"{name} is {what}: join or split it, or name why not" for name in there - set(named)
        ]
        rows += [f"{name} is no more {what}: remove the exception" for name in set(named) - there]
    return sorted(rows)


def show() -> None:
    """Print a line for each file: its lines and its purpose."""
    folder = None
    for path in product_files():
        name = path.relative_to(ROOT)
        if name.parent != folder:
            folder = name.parent
            init = path.parent / "__init__.py"
            print(f"\n{folder}/  {purpose(init) if init.exists() else ''}")
        print(f"  {name.name:28}{num_lines(path):5}  {purpose(path)}")
    files = product_files()
    print(f"\n{len(files)} files, {sum(map(num_lines, files))} lines")


if __name__ == "__main__":
    if "--check" in sys.argv:
        over = problems()
        print("\n".join(over))
        sys.exit(bool(over))
    show()
