"""The number of CPUs that this process may use, by affinity and control group quotas.

Groups of version 1 and 2 are read. Every group from the process's own up to the root may have a
limit (a systemd unit, a pod around a container); the tightest counts. See cgroups(7) and
proc_pid_mountinfo(5).
"""

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

PROC = Path("/proc/self")  # contains the files cgroup and mountinfo


def usable_cpus() -> set[int]:
    """Return the CPUs of the affinity mask; all CPUs on systems without masks (macOS)."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def available_cpus(proc: Path = PROC) -> int:
    """Return the cores of the affinity mask, limited by the tightest CPU quota; at least 1.

    OpenVINO's threads ignore both (its wheel uses TBB), so they are counted here.
    """
    return max(1, math.floor(min(len(usable_cpus()), cpu_quota(proc))))


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the CPU's name and the instruction sets that decide how INT8 runs on it."""
    try:
        pairs = [line.partition(":") for line in cpuinfo.read_text("utf-8").splitlines()]
    except OSError:
        return "unknown"
    facts = {key.strip(): value.strip() for key, _, value in reversed(pairs)}
    flags = set(facts.get("flags", "").split())
    int8_flags = [flag for flag in ("avx2", "avx512_vnni", "avx_vnni", "amx_int8") if flag in flags]
    return f"{facts.get('model name', 'unknown')} ({' '.join(int8_flags) or 'no int8 extensions'})"


def instructions_of(cpu: str) -> str:
    """Return the instruction sets in a text from :func:`cpu_model`."""
    return cpu.rpartition("(")[2].rstrip(")")


def cpu_quota(proc: Path = PROC) -> float:
    """Return the CPU quota in CPUs; infinite without a quota."""
    return min((_quota(folder) for folder in group_folders("cpu", proc)), default=math.inf)


def group_folders(controller: str, proc: Path) -> Iterator[Path]:
    """Yield the folders of all groups in which a controller's limits may be set."""
    try:
        groups = (proc / "cgroup").read_text("utf-8").splitlines()
        mounts = [line.split() for line in (proc / "mountinfo").read_text("utf-8").splitlines()]
    except OSError:
        return
    for line in groups:
        _, controllers, path = line.split(":", 2)
        for mount in mounts:
            if _is_hierarchy(mount, controllers.split(","), controller):
                yield from _upwards(Path(_text(mount[4])), _below(path, _text(mount[3])))


def _is_hierarchy(mount: list[str], controllers: list[str], controller: str) -> bool:
    """Whether a line of mountinfo is the hierarchy that a line of cgroup names."""
    kind, options = mount[mount.index("-") + 1], mount[-1].split(",")
    if controllers == [""]:  # version 2 has a single hierarchy
        return kind == "cgroup2"
    return kind == "cgroup" and controller in controllers and controller in options


def _below(group: str, root: str) -> PurePosixPath:
    """Return a group's path below the mount; the mount itself if the group is elsewhere."""
    path = PurePosixPath(group)
    return path.relative_to(root) if path.is_relative_to(root) else PurePosixPath()


def _upwards(mount: Path, path: PurePosixPath) -> Iterator[Path]:
    for inner in (path, *path.parents):
        if ".." not in inner.parts:  # outside of this process's namespace
            yield mount / inner


def _text(field: str) -> str:
    """Return a field of mountinfo, in which blanks are octal escapes."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), field)


def _quota(folder: Path) -> float:
    try:
        if (both := folder / "cpu.max").exists():
            quota, period = both.read_text("ascii").split()
        else:
            quota, period = (
                (folder / f"cpu.cfs_{name}_us").read_text("ascii").strip()
                for name in ("quota", "period")
            )
        return math.inf if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf
