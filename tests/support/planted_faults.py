"""Plants faults in the core modules and runs the tests of each module: make mutations.

Where a module's own test files find nothing, those of its package run.

A fault is a change of the syntax tree: a comparison turned, an integer off by one, a condition
negated, a return dropped. No file changes: a fork of this process imports the module with its
fault, and runs pytest. A module's faults are the same for the same seed and code.
"""

import argparse
import ast
import importlib.abc
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from random import Random
from types import CodeType
from typing import Any

from models.machine import describe_machine
from tests.support import module_tests

ROOT = Path(__file__).parents[2]
FOLDERS = ("app/queueing/", "app/graph/", "app/access", "models/ensemble", "models/image")
CORE = tuple(module for module in module_tests.modules() if module.startswith(FOLDERS))
TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
OURS = re.compile(r"(app|calibration|models|tests)(\.(?!.*_pb2)|$)")  # messages register once
DEADLINE_S = 120  # of a run of one module's tests, which take up to 30: what hangs is killed
FOUND = ("found", "hung")  # outcomes
NEIGHBOURS_DEADLINE_S = 400  # of the tests of a module's package
WHOLE_DEADLINE_S = 900  # of all tests together, without a fault


@dataclass(frozen=True)
class Fault:
    """A place of a module's tree, by its number in ast.walk, and what is done there."""

    module: str
    line: int
    kind: str
    place: int
    source: str


def main() -> None:
    """Print JSON: every fault planted, and whether a test failed."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--faults", type=int, default=60)
    arguments.add_argument("--seed", type=int, default=41)
    arguments.add_argument("--only", default="", help="modules whose path contains this")
    arguments.add_argument("--results", type=Path, help="go on from this file, and write it")
    chosen = arguments.parse_args()
    import_module("tests.support.fakes")  # the forks need not import what it imports

    faults = [f for f in sample(chosen.faults, chosen.seed) if chosen.only in f.module]
    outcomes = _found_before(chosen.results)
    left = [fault for fault in faults if fault not in outcomes]
    tests = sorted({test for fault in left for test in tests_of(fault.module)})
    if left and (outcome := outcome_of(None, tests, WHOLE_DEADLINE_S)) != "survived":
        sys.exit(f"the tests fail without a fault ({outcome}): mend them first")
    machine = _machine()
    for fault in left:
        begun = time.monotonic()
        outcomes[fault] = outcome_of(fault, tests_of(fault.module))
        if outcomes[fault] == "survived":
            others = outcome_of(fault, neighbours_of(fault.module), NEIGHBOURS_DEADLINE_S)
            outcomes[fault] = "found" if others == "found" else "survived"  # many may be slow
        where = f"{fault.module}:{fault.line} {fault.kind}: {fault.source}"
        took = f"{outcomes[fault]:9}{time.monotonic() - begun:4.0f} s"
        print(took, where, file=sys.stderr, flush=True)
        if chosen.results:
            chosen.results.write_text(_report(chosen.seed, machine, faults, outcomes), "utf-8")
    print(_report(chosen.seed, machine, faults, outcomes), end="")


def _found_before(file: Path | None) -> dict[Fault, str]:
    """Return the faults that tests found in an earlier run; a module that changed has others."""
    if file is None or not file.exists():
        return {}
    results = json.loads(file.read_text("utf-8"))["faults"]
    return {
        Fault(**{k: v for k, v in result.items() if k != "outcome"}): result["outcome"]
        for result in results
        if result["outcome"] in FOUND
    }


def _report(seed, machine, faults, outcomes):
    rows = [{**asdict(f), "outcome": outcomes[f]} for f in faults if f in outcomes]
    num_found = sum(row["outcome"] in FOUND for row in rows)
    figures = {"seed": seed, "planted": len(rows), "found": num_found, "faults": rows}
    return json.dumps({**machine, **figures}, indent=1) + "\n"


def _machine() -> dict[str, Any]:
    command = " ".join(["python -m tests.support.planted_faults", *sys.argv[1:]])
    git = ("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD")
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {**describe_machine(("pytest",)), "command": command, "commit": commit}


def sample(num_faults: int, seed: int) -> list[Fault]:
    """Return faults spread evenly over the core modules."""
    places = [list(faults_of(module)) for module in CORE]
    for module, faults in zip(CORE, places, strict=True):
        Random(f"{seed} {module}").shuffle(faults)  # whatever changes in other modules
    rounds = [
        [faults[turn] for faults in places if turn < len(faults)] for turn in range(num_faults)
    ]
    return [fault for faults in rounds for fault in faults][:num_faults]


def faults_of(module: str) -> Iterator[Fault]:
    tree = ast.parse((ROOT / module).read_text("utf-8"))
    skipped = _without_effect(tree)
    for place, node in enumerate(ast.walk(tree)):
        if id(node) not in skipped and (kind := _kind(node)):
            line = getattr(node, "lineno", 0) or node.test.lineno  # type: ignore[attr-defined]
            yield Fault(module, line, kind, place, ast.unparse(node).splitlines()[0])


def planted(fault: Fault) -> ast.Module:
    tree = ast.parse((ROOT / fault.module).read_text("utf-8"))
    node = list(ast.walk(tree))[fault.place]
    match node:
        case ast.Compare():
            node.ops[0] = TURNED[type(node.ops[0])]()
        case ast.Constant():
            node.value = int(str(node.value)) + 1
        case ast.If() | ast.IfExp() | ast.While():
            node.test = ast.copy_location(ast.UnaryOp(ast.Not(), node.test), node.test)
        case ast.Return():
            node.value = None
        case _:
            raise ValueError(f"no fault is known for {ast.unparse(node)}")
    return ast.fix_missing_locations(tree)


def tests_of(module: str) -> list[str]:
    """Return the test files of a module, without those that draw their input."""
    return [test for test in module_tests.tests_of(module) if "fuzz" not in Path(test).stem]


def neighbours_of(module: str) -> list[str]:
    """Return the other test files of a module's package, which may find what its own do not."""
    folder = ROOT / "tests" / "unit" / Path(module).parent.as_posix().removeprefix("app/")
    files = {str(file.relative_to(ROOT)) for file in folder.glob("test_*.py")}
    return sorted(file for file in files - {*tests_of(module)} if "fuzz" not in file)


def outcome_of(fault: Fault | None, tests: list[str], deadline_s: float = DEADLINE_S) -> str:
    """Run tests in a fork; return "found", "survived", "hung" or "broken"."""
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if child == 0:
            os.setsid()
            status = 70  # neither pytest's "passed" nor its "failed"
            try:
                with redirect_stdout(output), redirect_stderr(output):
                    status = _run_tests(fault, tests)
            except BaseException:
                traceback.print_exc(file=output)
            finally:
                output.flush()
                os._exit(status)
        ended = _wait(child, deadline_s)
        if ended is None:
            return "hung"
        if ended > 1:
            output.seek(0)
            print(output.read()[-2000:], file=sys.stderr)
        return {0: "survived", 1: "found", 2: "found"}.get(ended, "broken")  # 2: not even imported


def _run_tests(fault: Fault | None, tests: list[str]) -> int:
    import pytest

    for name in [name for name in sys.modules if OURS.match(name)]:
        del sys.modules[name]  # imported anew, the one with its fault
    if fault:
        sys.meta_path.insert(0, PlantingFinder(fault))
    options = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # imported before the fork
    try:
        return int(pytest.main([*options, "-m", "not slow", *tests]))
    except pytest.PytestUnraisableExceptionWarning:
        return 1  # a coroutine that nobody awaited, at the end: pytest's command fails too


def _wait(child: int, within_s: float) -> int | None:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


class PlantingFinder(importlib.abc.MetaPathFinder):
    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self._name = fault.module.removesuffix(".py").replace("/", ".")

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        location = ROOT / self._fault.module
        loader = _PlantingLoader(name, str(location), self._fault)
        return importlib.util.spec_from_file_location(name, location, loader=loader)


class _PlantingLoader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, fault: Fault) -> None:
        super().__init__(name, path)
        self._fault = fault

    def get_code(self, fullname: str) -> CodeType:
        return compile(planted(self._fault), self.path, "exec", dont_inherit=True)


def _kind(node: ast.AST) -> str | None:
    match node:
        case ast.Compare(ops=[op]) if type(op) in TURNED:
            return "comparison turned"
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return "constant off by one"
        case ast.If() | ast.IfExp() | ast.While():
            return "condition negated"
        case ast.Return(value=ast.expr()):
            return "return dropped"
    return None


def _without_effect(tree: ast.Module) -> set[int]:
    """Return the nodes whose change nothing can notice: types, and imports for them."""
    parts: list[ast.AST | None] = []
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                parts.append(node.returns)
            case ast.arg() | ast.AnnAssign():
                parts.append(node.annotation)
            case (
                ast.If(test=ast.Name(id="TYPE_CHECKING"))
                | ast.Return(value=ast.Constant(value=None))
            ):
                parts.append(node)
    return {id(inner) for part in parts if part for inner in ast.walk(part)}


if __name__ == "__main__":
    main()
