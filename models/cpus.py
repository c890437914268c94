"""How many CPUs this process may use: affinity and cgroup quotas considered."""

import math
import os
from pathlib import Path

from models.cgroups import PROC, cpu_quota


def available_cpus(proc: Path = PROC) -> int:
    """Return the cores of the affinity mask, cut to the tightest CPU quota; at least one.

    OpenVINO's threads know neither (its wheel uses TBB), so they are counted here.
    """
    return max(1, math.floor(min(len(os.sched_getaffinity(0)), cpu_quota(proc))))


def has_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether the CPU multiplies bfloat16 itself; emulated, it is many times slower."""
    try:
        flags = set(cpuinfo.read_text("utf-8").split())
    except OSError:
        return False
    return bool(flags & {"avx512_bf16", "amx_bf16"})


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the CPU's name and the instruction sets that decide how INT8 runs on it."""
    try:
        pairs = [line.partition(":") for line in cpuinfo.read_text("utf-8").splitlines()]
    except OSError:
        return "unknown"
    facts = {key.strip(): value.strip() for key, _, value in reversed(pairs)}
    flags = set(facts.get("flags", "").split())
    found = [flag for flag in ("avx2", "avx512_vnni", "avx_vnni", "amx_int8") if flag in flags]
    return f"{facts.get('model name', 'unknown')} ({' '.join(found) or 'no int8 extensions'})"


def instructions_of(cpu: str) -> str:
    """Return the instruction sets in what :func:`cpu_model` said of a CPU."""
    return cpu.rpartition("(")[2].rstrip(")")
