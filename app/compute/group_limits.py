"""What the machine, control groups and the user's limits leave this process.

A limit may stand on any group from its own up to the root: the tightest counts.
"""

import math
import os
import resource
from pathlib import Path
from typing import NamedTuple

import psutil

from models.cpus import PROC, group_folders


class Limit(NamedTuple):
    """How much a group may have, and how much it has."""

    most: float  # math.inf: no limit
    used: float

    @property
    def left(self) -> float:
        return max(0.0, self.most - self.used)


def memory_left(proc: Path = PROC) -> float:
    """Return the bytes that the process may still take; infinite without a limit."""
    return min((_memory(folder).left for folder in group_folders("memory", proc)), default=math.inf)


def free_memory(proc: Path = PROC) -> int:
    """Return bytes: of the machine, cut to what the tightest limit of its groups leaves."""
    return int(min(psutil.virtual_memory().available, memory_left(proc)))


def tightest_pids_limit(proc: Path = PROC) -> Limit:
    """Return the limit of processes and threads of which the least is left."""
    limits = [
        Limit(_number(folder, "pids.max"), _number(folder, "pids.current", 0))
        for folder in group_folders("pids", proc)
    ]
    return min(limits, key=lambda limit: limit.left, default=Limit(math.inf, 0))


def user_limit() -> Limit:
    """Return the limit of processes and threads of this user; root has none."""
    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if most == resource.RLIM_INFINITY or os.geteuid() == 0:
        return Limit(math.inf, 0)
    processes = psutil.process_iter(["uids", "num_threads"])
    own = [p.info for p in processes if p.info["uids"] and p.info["uids"].real == os.getuid()]
    return Limit(most, sum(one["num_threads"] or 1 for one in own))


def _memory(folder: Path) -> Limit:
    if (folder / "memory.max").exists():
        most, used = (_number(folder, f"memory.{name}") for name in ("max", "current"))
    else:
        most, used = (_number(folder, f"memory.{name}_in_bytes") for name in ("limit", "usage"))
    if math.isinf(most) or math.isinf(used):
        return Limit(math.inf, 0)
    return Limit(most, used - _inactive_files(folder))


def _inactive_files(folder: Path) -> int:
    """Return bytes that count as used, though given up when needed: files that were read once."""
    try:
        words = (folder / "memory.stat").read_text("ascii").split()
    except (OSError, ValueError):
        return 0
    facts = dict(zip(words[::2], words[1::2], strict=False))
    # Version 1's own count leaves the groups below out, its total does not.
    return int(facts.get("total_inactive_file", facts.get("inactive_file", "0")))


def _number(folder: Path, file: str, otherwise: float = math.inf) -> float:
    try:
        return int((folder / file).read_text("ascii"))
    except (OSError, ValueError):  # "max" is no number
        return otherwise
