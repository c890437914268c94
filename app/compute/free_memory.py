"""How much memory this process may still take: the machine's, and its container's."""

from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")  # v2; memory.max is bytes, or "max"


def free_memory(cgroup: Path = CGROUP) -> int:
    """Return bytes: of the machine, cut to what the container's limit leaves."""
    free: int = psutil.virtual_memory().available
    try:
        limit = int((cgroup / "memory.max").read_text("ascii"))
        used = int((cgroup / "memory.current").read_text("ascii"))
        facts = (cgroup / "memory.stat").read_text("ascii").split()
        # Counted as used, though given up when needed: pages of files that were read once.
        given_up = int(facts[facts.index("inactive_file") + 1])
    except (OSError, ValueError, IndexError):  # no container, or one without a limit
        return free
    return max(0, min(free, limit - used + given_up))
