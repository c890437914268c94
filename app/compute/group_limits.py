"""The CPU and memory limits of the machine, its control groups and the user.

Every group from the process's own up to the root may have a limit; the tightest counts.
"""

import math
import os
import resource
from pathlib import Path
from typing import NamedTuple

import psutil

from models.cpus import PROC, group_folders


class Limit(NamedTuple):
    """A limit, and how much of it is used."""

    most: float  # math.inf without a limit
    used: float

    @property
    def left(self) -> float:
        return max(0.0, self.most - self.used)


def memory_left(proc: Path = PROC) -> float:
    """Return the bytes that the process may still allocate; infinite without a limit."""
    return min((_memory(folder).left for folder in group_folders("memory", proc)), default=math.inf)


def free_memory(proc: Path = PROC) -> int:
    """Return the machine's free bytes, or what the tightest limit of a group leaves if less."""
    return int(min(psutil.virtual_memory().available, memory_left(proc)))


def tightest_pids_limit(proc: Path = PROC) -> Limit:
    """Return the limit of processes and threads that leaves the fewest."""
    limits = [
        Limit(_number(folder, "pids.max"), _number(folder, "pids.current", 0))
        for folder in group_folders("pids", proc)
    ]
    return min(limits, key=lambda limit: limit.left, default=Limit(math.inf, 0))


def user_limit() -> Limit:
    """Return this user's limit of processes and threads; root has none."""
    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if most == resource.RLIM_INFINITY or os.geteuid() == 0:
        return Limit(math.inf, 0)
    processes = psutil.process_iter(["uids", "num_threads"])
    own = [p.info for p in processes if p.info["uids"] and p.info["uids"].real == os.getuid()]
    return Limit(most, sum(info["num_threads"] or 1 for info in own))


def _memory(folder: Path) -> Limit:
    if (folder / "memory.max").exists():
        most, used = (_number(folder, f"memory.{name}") for name in ("max", "current"))
    else:
        most, used = (_number(folder, f"memory.{name}_in_bytes") for name in ("limit", "usage"))
    if math.isinf(most) or math.isinf(used):
        return Limit(math.inf, 0)
    return Limit(most, used - _inactive_files(folder))


def _inactive_files(folder: Path) -> int:
    """Return bytes of cached files that count as used, but are freed when memory is needed."""
    try:
        words = (folder / "memory.stat").read_text("ascii").split()
    except (OSError, ValueError):
        return 0
    facts = dict(zip(words[::2], words[1::2], strict=False))
    # In version 1 the plain count omits child groups, the total includes them.
    return int(facts.get("total_inactive_file", facts.get("inactive_file", "0")))


def _number(folder: Path, file: str, otherwise: float = math.inf) -> float:
    try:
        return int((folder / file).read_text("ascii"))
    except (OSError, ValueError):  # "max" is not a number
        return otherwise
