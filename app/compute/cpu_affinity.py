"""CPU affinity: gives each replica on a machine its own cores.

OpenVINO's own pinning gives every process the same first cores, and Ray only counts CPUs. Here each
replica takes the first free place of :func:`place_replicas`. A file lock holds a place; the kernel
releases it however the process ends. The machine's cores are read from sysfs
(admin-guide/cputopology.rst).
"""

import fcntl
import logging
import os
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from models.cpus import usable_cpus

logger = logging.getLogger("ray.serve")
LOCKS = Path(tempfile.gettempdir()) / f"tandem-cores-{os.getuid()}"
SYSFS = Path("/sys/devices/system")
_held: list[int] = []  # file descriptors; open as long as the process lives


@dataclass(frozen=True, order=True)
class Core:
    """One physical core."""

    node: int  # NUMA node
    package: int  # socket
    cpus: tuple[int, ...]  # logical CPUs that this process may use: two with SMT


def keep_to_own_cores(num_cpus: int, locks: Path = LOCKS) -> tuple[int, ...] | None:
    """Move this process to ``num_cpus`` free logical CPUs, and return them.

    If every place is taken, or none can be locked, it returns None, logs a warning, and does not
    move the process.
    """
    if not hasattr(os, "sched_setaffinity"):
        logger.warning("affinity: this system keeps no process to cores; leave the setting out")
        return None
    cores = read_cores()
    try:
        place = claim(place_replicas(cores, num_cpus), locks)
    except OSError as error:  # another account has a file or folder of that name
        logger.warning(
            "affinity: no place can be locked: %s; this replica shares cores. Remove it, or leave "
            "the setting out",
            error,
        )
        return None
    if place is None:
        logger.warning(
            "no %d CPUs of one NUMA node are free of other replicas on this machine (%s): this one "
            "shares cores, and all of them get slower; give fewer replicas, or a smaller num_cpus",
            num_cpus,
            f"{len(cores)} cores, {sum(len(core.cpus) for core in cores)} CPUs, "
            f"{len({core.node for core in cores})} NUMA nodes",
        )
        return None
    _move_threads(place)
    logger.info("this replica keeps to CPUs %s", place)
    return place


def claim(places: Sequence[tuple[int, ...]], locks: Path) -> tuple[int, ...] | None:
    """Take the first place whose CPUs are all free; return None if there is none.

    Only one process claims at a time. Otherwise two processes that each hold part of a place would
    both give it up.
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
    """Move all threads of this process; threads that they start later inherit it.

    Listing the threads again finds those started by a thread that had not moved yet.
    """
    moved: set[int] = set()
    while rest := {int(task.name) for task in Path("/proc/self/task").iterdir()} - moved:
        for thread in rest:
            with suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(thread, cpus)
        moved |= rest


def read_cores(allowed: Iterable[int] | None = None, sysfs: Path = SYSFS) -> list[Core]:
    """Return the cores of the CPUs this process may use, by NUMA node, socket and number.

    If sysfs is missing (some containers), every CPU counts as a core of node 0.
    """
    cpus = set(usable_cpus() if allowed is None else allowed)
    node_of = _nodes(sysfs)
    siblings: dict[tuple[int, ...], Core] = {}
    for cpu in sorted(cpus):
        topology = sysfs / "cpu" / f"cpu{cpu}" / "topology"
        package = _read_number(topology / "physical_package_id")
        threads = cpu_list(_read(topology / "thread_siblings_list")) or [cpu]
        mine = tuple(t for t in threads if t in cpus)
        siblings[mine] = Core(node_of.get(cpu, 0), package, mine)
    return sorted(siblings.values())


def place_replicas(cores: Sequence[Core], num_cpus: int) -> list[tuple[int, ...]]:
    """Divide the cores into places of ``num_cpus`` logical CPUs for as many replicas as fit.

    A place never spans two NUMA nodes (each has its own memory) and no two places share a core (its
    threads share its units). Cores left over in a node stay free.
    """
    places = []
    for _, of_node in groupby(sorted(cores), key=lambda core: core.node):
        place: list[int] = []
        for core in of_node:
            place += core.cpus
            if len(place) >= num_cpus:
                places.append(tuple(sorted(place)))
                place = []
    return places


def cpu_list(text: str) -> list[int]:
    """Parse the kernel's list ``0-3,8,10-11``."""
    cpus: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdecimal():
            cpus += range(int(first), int(last or first) + 1)
    return cpus


def _nodes(sysfs: Path) -> dict[int, int]:
    folders = [f for f in (sysfs / "node").glob("node*") if f.name[4:].isdecimal()]
    return {cpu: int(f.name[4:]) for f in folders for cpu in cpu_list(_read(f / "cpulist"))}


def _read(path: Path) -> str:
    try:
        return path.read_text("ascii")
    except (OSError, UnicodeDecodeError):
        return ""


def _read_number(path: Path) -> int:
    text = _read(path).strip()
    return int(text) if text.isdecimal() else 0  # -1 on some virtual machines
