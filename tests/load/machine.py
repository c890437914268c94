"""What a benchmark's result says of the machine and the versions it was made with.

Importing it also makes the project's ``tests.support`` importable from the scripts beside it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import typer

from models.machine import describe_machine

ROOT = Path(__file__).parent.parent.parent
sys.path.append(str(ROOT))


def describe() -> dict[str, Any]:
    """Return commit, command, CPU and versions, to be stored with every result."""
    facts = describe_machine()
    commit = _git("rev-parse", "--short=12", "HEAD")
    if _git("status", "--porcelain", "--", ".", ":!tests/load/results"):
        commit += "-dirty"
    command = " ".join(["python", os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]])
    memory_gib = round(psutil.virtual_memory().total / 2**30, 1)
    return {**facts, "command": command, "commit": commit, "memory_gib": memory_gib}


def write_result(result: dict[str, Any], file: Path | None) -> None:
    """Print a benchmark's result as JSON, and write it to ``file`` if there is one."""
    text = json.dumps(result, indent=2)
    typer.echo(text)
    if file is not None:
        file.write_text(text + "\n", "utf-8")


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def process_tree(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def pss_mb(processes: list[psutil.Process]) -> dict[str, float]:
    """Return the proportional set size by process name, in MB (10^6 bytes)."""
    sizes: dict[str, float] = {}
    for process in processes:
        try:
            name = (process.cmdline() or [process.name()])[0].rsplit("/", 1)[-1]
            size = process.memory_full_info().pss / 1e6
        except psutil.NoSuchProcess:
            continue
        sizes[name] = round(sizes.get(name, 0.0) + size, 1)
    return sizes


def cpu_seconds(processes: list[psutil.Process]) -> float:
    """Return the CPU time used so far, user and system, of all that still run."""
    total = 0.0
    for process in processes:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total
