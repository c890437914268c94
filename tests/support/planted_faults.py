"""Plants faults in the core modules and runs the tests that should find each: make mutations.

The faults are those of ``tests/load/results/planted_faults.json``: a text that occurs once in a
module, what stands in its place, and the test file that should find it. A unit test says when code
has moved away from its fault. ``--draw MODULE`` prints faults for a new module.

No file changes: a fork of this process imports the module with its fault, and runs pytest.
"""

import argparse
import ast
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
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from importlib.machinery import SourceFileLoader
from pathlib import Path
from random import Random
from types import CodeType
from typing import Any

from models.machine import describe_machine
from tests.support import module_tests

ROOT = Path(__file__).parents[2]
LEDGER = ROOT / "tests/load/results/planted_faults.json"
FOLDERS = ("app/queueing/", "app/graph/", "app/access", "models/ensemble", "models/image")
CORE = tuple(module for module in module_tests.modules() if module.startswith(FOLDERS))
TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
OURS = re.compile(r"(app|calibration|models|tests)(\.(?!.*_pb2)|$)")  # messages register once
FOUND = ("found", "hung")  # outcomes
DEADLINE_S = 300  # of a test file without a fault
# With a fault a file has three times as long as without one, and this: what hangs is killed.
MORE_S = 20


@dataclass(frozen=True)
class Fault:
    """A text of a module, what is planted in its place, and the test file that should find it.

    ``outcome`` is that of the last run, None before the first.
    """

    module: str
    kind: str
    text: str
    planted: str
    test: str
    outcome: str | None = None


def main() -> None:
    """Print JSON: every fault planted, and whether a test failed."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--only", default="", help="modules whose path contains this")
    arguments.add_argument("--left", action="store_true", help="those that no run has found yet")
    arguments.add_argument("--write", action="store_true", help="keep the outcomes in the file")
    arguments.add_argument("--draw", metavar="MODULE", help="print ten faults for a module instead")
    chosen = arguments.parse_args()
    if chosen.draw:
        print(json.dumps([asdict(fault) for fault in drawn(chosen.draw)], indent=1))
        return
    import_module("tests.support.fakes")  # the forks need not import what it imports

    faults = known_faults()
    asked = [
        number
        for number, fault in enumerate(faults)
        if chosen.only in fault.module and not (chosen.left and fault.outcome in FOUND)
    ]
    machine = _machine()
    took_s = {test: _seconds_of(test) for test in sorted({faults[number].test for number in asked})}
    for number in asked:
        begun, fault = time.monotonic(), faults[number]
        outcome = outcome_of(fault, fault.test, MORE_S + 3 * took_s[fault.test])
        faults[number] = replace(fault, outcome=outcome)
        where = f"{fault.module} {fault.kind}: {fault.text.splitlines()[0].strip()}"
        print(f"{outcome:9}{time.monotonic() - begun:4.0f} s", where, file=sys.stderr, flush=True)
        if chosen.write:
            LEDGER.write_text(_report(machine, faults), "utf-8")
    print(_report(machine, [faults[number] for number in asked]), end="")


def known_faults() -> list[Fault]:
    return [Fault(**fault) for fault in json.loads(LEDGER.read_text("utf-8"))["faults"]]


def _report(machine: dict[str, Any], faults: list[Fault]) -> str:
    num_found = sum(fault.outcome in FOUND for fault in faults)
    figures = {"planted": len(faults), "found": num_found, "faults": [*map(asdict, faults)]}
    return json.dumps({**machine, **figures}, indent=1) + "\n"


def _seconds_of(test: str) -> float:
    begun = time.monotonic()
    if (outcome := outcome_of(None, test, DEADLINE_S)) != "survived":
        sys.exit(f"{test} fails without a fault ({outcome}): mend it first")
    return time.monotonic() - begun


def _machine() -> dict[str, Any]:
    command = " ".join(["python -m tests.support.planted_faults", *sys.argv[1:]])
    git = ("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD")
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {**describe_machine(("pytest",)), "command": command, "commit": commit}


def planted(fault: Fault) -> str:
    """Return the module's source with its fault.

    Raises:
        ValueError: the text does not occur exactly once.
    """
    source = (ROOT / fault.module).read_text("utf-8")
    if (num := source.count(fault.text)) != 1:
        raise ValueError(
            f"{fault.module} has {num} times, not once: {fault.text!r}; give the fault in "
            f"{LEDGER.name} the text that took its place"
        )
    return source.replace(fault.text, fault.planted)


def drawn(module: str) -> list[Fault]:
    """Return ten of the faults that can be planted in a module; the same for the same code."""
    faults = list(faults_of(module))
    Random(module).shuffle(faults)
    return faults[:10]


def faults_of(module: str) -> Iterator[Fault]:
    """Yield a fault for each place, in whole lines: as many as make its text unique."""
    source, test = (ROOT / module).read_text("utf-8"), module_tests.tests_of(module)[0]
    tree, lines = ast.parse(source), source.splitlines(keepends=True)
    skipped = _without_effect(tree)
    for node in ast.walk(tree):
        if id(node) in skipped or not (change := _change(node)):
            continue
        kind, part, new = change
        first, last = part.lineno - 1, part.end_lineno
        text = "".join(lines[first:last])
        start = len(lines[first].encode()[: part.col_offset].decode())
        end = len(text) - len(lines[last - 1].encode()[part.end_col_offset :].decode())
        changed = text[:start] + new + text[end:]
        while source.count(text) > 1:
            first -= 1
            text, changed = lines[first] + text, lines[first] + changed
        yield Fault(module, kind, text, changed, test)


def outcome_of(fault: Fault | None, test: str, deadline_s: float) -> str:
    """Run a test file in a fork; return "found", "survived", "hung" or "broken"."""
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if child == 0:
            os.setsid()
            status = 70  # neither pytest's "passed" nor its "failed"
            try:
                with redirect_stdout(output), redirect_stderr(output):
                    status = _run_tests(fault, test)
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


def _run_tests(fault: Fault | None, test: str) -> int:
    import pytest

    for name in [name for name in sys.modules if OURS.match(name)]:
        del sys.modules[name]  # imported anew, the one with its fault
    if fault:
        _plant(fault)
    options = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # imported before the fork
    try:
        return int(pytest.main([*options, "-m", "not slow", test]))
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


def _plant(fault: Fault) -> None:
    """Let a module be imported with its fault."""
    name, own = fault.module.removesuffix(".py").replace("/", "."), SourceFileLoader.get_code

    def get_code(loader: SourceFileLoader, fullname: str) -> CodeType | None:
        if fullname != name:
            return own(loader, fullname)
        return compile(planted(fault), loader.path, "exec", dont_inherit=True)

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign, assignment]


def _change(node: ast.AST) -> tuple[str, Any, str] | None:
    """Return a fault's kind, the node it replaces, and the new text; None: there is none here."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in TURNED:
            turned = ast.Compare(left, [TURNED[type(op)]()], [right])
            return "comparison turned", node, ast.unparse(turned)
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return "constant off by one", node, str(value + 1)
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            return "condition negated", test, f"not ({ast.unparse(test)})"
        case ast.Return(value=ast.expr()):
            return "return dropped", node, "return None"
    return None


def _without_effect(tree: ast.Module) -> set[int]:
    """Return the nodes whose change nothing can notice: types, imports for them, texts."""
    parts: list[ast.AST | None] = []
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                parts.append(node.returns)
            case ast.arg() | ast.AnnAssign():
                parts.append(node.annotation)
            case ast.JoinedStr():  # has no places of its parts
                parts.append(node)
            case (
                ast.If(test=ast.Name(id="TYPE_CHECKING"))
                | ast.Return(value=ast.Constant(value=None))
            ):
                parts.append(node)
    return {id(inner) for part in parts if part for inner in ast.walk(part)}


if __name__ == "__main__":
    main()
