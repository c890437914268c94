"""The machine's physical cores, their logical CPUs and NUMA nodes, and replicas placed on them.

Read from sysfs, the kernel's own description (admin-guide/cputopology.rst).
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

SYSFS = Path("/sys/devices/system")


@dataclass(frozen=True, order=True)
class Core:
    """One physical core."""

    node: int  # NUMA node
    package: int  # socket
    cpus: tuple[int, ...]  # logical CPUs that this process may use: two with SMT


def read_cores(allowed: Iterable[int] | None = None, sysfs: Path = SYSFS) -> list[Core]:
    """Return the cores of the CPUs this process may use, by NUMA node, socket and number.

    Where the kernel tells nothing (some containers), every CPU counts as a core of node 0.
    """
    cpus = set(os.sched_getaffinity(0) if allowed is None else allowed)
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
    threads share its units). What is left over in a node stays free.
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
    """Read the kernel's ``0-3,8,10-11``."""
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
