"""How much memory this process may still take: the machine's, and its container's."""

from pathlib import Path

import psutil

from app.compute.group_limits import memory_left
from models.cgroups import PROC


def free_memory(proc: Path = PROC) -> int:
    """Return bytes: of the machine, cut to what the tightest limit of its groups leaves."""
    return int(min(psutil.virtual_memory().available, memory_left(proc)))
