"""CPU affinity: gives every replica of a machine cores of its own.

OpenVINO's own pinning gives every process the same first cores, and Ray only counts CPUs. Here the
first replica takes the first free place of :func:`app.compute.topology.place_replicas`, the next
one the next. A place is held by file locks, which the kernel releases however the process ends.
"""

import fcntl
import logging
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from app.compute.topology import Core, place_replicas, read_cores

logger = logging.getLogger("ray.serve")
LOCKS = Path(tempfile.gettempdir()) / f"tandem-cores-{os.getuid()}"
_held: list[int] = []  # file descriptors; open as long as the process lives


def keep_to_own_cores(num_cpus: int, locks: Path = LOCKS) -> tuple[int, ...] | None:
    """Move this process to ``num_cpus`` logical CPUs that no other replica has; return them.

    None if every place is taken: then it stays where it is, and a warning says so.
    """
    cores = read_cores()
    place = claim(place_replicas(cores, num_cpus), locks)
    if place is None:
        logger.warning(
            "no %d CPUs of one NUMA node are free of other replicas on this machine (%s): this one "
            "shares cores, and all of them get slower; give fewer replicas, or a smaller num_cpus",
            num_cpus,
            _told(cores),
        )
        return None
    _move_threads(place)
    logger.info("this replica keeps to CPUs %s", place)
    return place


def claim(places: Sequence[tuple[int, ...]], locks: Path) -> tuple[int, ...] | None:
    """Take the first place of which no CPU is another process's; None if there is none.

    One process claims at a time: two that each had a part of a place would both leave it.
    """
    locks.mkdir(mode=0o700, exist_ok=True)
    claiming = _open(locks / "claiming")
    try:
        fcntl.flock(claiming, fcntl.LOCK_EX)
        return _claim(places, locks)
    finally:
        os.close(claiming)


def _claim(places: Sequence[tuple[int, ...]], locks: Path) -> tuple[int, ...] | None:
    for place in places:
        taken = [fd for cpu in place if (fd := _lock(locks / str(cpu))) is not None]
        if len(taken) == len(place):
            _held.extend(taken)
            return place
        for descriptor in taken:
            os.close(descriptor)
    return None


def _lock(path: Path) -> int | None:
    descriptor = _open(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _move_threads(cpus: tuple[int, ...]) -> None:
    """Move all threads of this process; those that they start later inherit it.

    Threads that were started by one that had not moved yet are found by listing them again.
    """
    moved: set[int] = set()
    while rest := {int(task.name) for task in Path("/proc/self/task").iterdir()} - moved:
        for thread in rest:
            with suppress(ProcessLookupError):  # it has ended since
                os.sched_setaffinity(thread, cpus)
        moved |= rest


def _told(cores: Sequence[Core]) -> str:
    nodes = {core.node for core in cores}
    return f"{len(cores)} cores, {sum(len(c.cpus) for c in cores)} CPUs, {len(nodes)} NUMA nodes"
