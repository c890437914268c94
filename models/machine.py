"""The machine a process runs on: its CPUs, its memory, and its installed packages.

The number of usable CPUs follows affinity and control group quotas, of version 1 and 2. Every group
from the process's own up to the root may have a limit (a systemd unit, a pod around a container);
the tightest counts. See cgroups(7) and proc_pid_mountinfo(5).

Memory is returned to the system after compiling, and freed memory is kept for decoding. CPU
packages have counters of energy (:class:`PackagePower`). Installed packages have versions for
results, and an extra that a missing package belongs to.
"""

import ctypes
import math
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from models.errors import TandemError

PROC = Path("/proc/self")  # contains the files cgroup and mountinfo
MAPS = Path("/proc/self/maps")
POWERCAP = Path("/sys/class/powercap")  # RAPL's counters of energy
# Address range and file of a mapping whose pages can be dropped without loss; proc_pid_maps(5).
_SHARED_READ_ONLY = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) r--s \S+ \S+ \S+ +(/.+)$", re.MULTILINE)
_MADV_DONTNEED = 4  # Linux's; madvise(2)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's; mallopt(3)
KEPT_BYTES = 16 * 2**20  # of freed memory, at most, in each thread's arena
MAPPED_BYTES = 4 * 2**20  # larger allocations get their own mapping, which is returned when freed
DISTRIBUTION = "tandem-serve"  # the project's name on PyPI; "tandem" there is another project
OF_A_SERVICE = ("ray", "openvino", "opencv-python-headless", "numpy", "fastapi", "uvicorn")


class MissingExtraError(TandemError):
    """A package that only one extra of the project brings is not there."""

    code = "missing_extra"


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
            kind, options = mount[mount.index("-") + 1], mount[-1].split(",")
            is_of = kind == "cgroup" and controller in controllers.split(",")
            is_first = is_of and controller in options  # version 2 has a single hierarchy
            if not (is_first if controllers else kind == "cgroup2"):
                continue
            group, root = PurePosixPath(path), _text(mount[3])
            # The mount itself counts if the group is elsewhere.
            below = group.relative_to(root) if group.is_relative_to(root) else PurePosixPath()
            for inner in (below, *below.parents):
                if ".." not in inner.parts:  # outside of this process's namespace
                    yield Path(_text(mount[4])) / inner


def _text(field: str) -> str:
    """Return a field of mountinfo, in which blanks are octal escapes."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), field)


def _quota(folder: Path) -> float:
    try:
        if (both := folder / "cpu.max").exists():
            quota, period = both.read_text("ascii").split()
        else:
            files = (folder / f"cpu.cfs_{name}_us" for name in ("quota", "period"))
            quota, period = (file.read_text("ascii").strip() for file in files)
        return math.inf if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf


def num_oom_kills(proc: Path = PROC) -> int:
    """Return how many processes of this one's memory group the kernel's OOM killer has ended.

    The kernel counts them in their own group, whichever group's limit was reached.
    """
    for folder in group_folders("memory", proc):
        for name in ("memory.events", "memory.oom_control"):  # versions 2 and 1
            with suppress(OSError, ValueError, KeyError):
                lines = (folder / name).read_text("ascii").splitlines()
                return int(dict(line.split() for line in lines)["oom_kill"])
    return 0


def give_back_memory(*folders: Path) -> None:
    """Return memory that compiling has freed, and drop pages mapped from files in ``folders``.

    OpenVINO keeps the networks' files mapped as long as a network lives, though its kernels use
    copies of nearly all weights. Dropped pages that are used again come from the system's cache.
    The bundled set's processes shrink by 55 MB and 135 MB (decision 0009). Without glibc or /proc
    this does nothing.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc's
        libc.malloc_trim(0)
    if not hasattr(libc, "madvise"):
        return
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    wanted = {folder.resolve() for folder in folders}
    try:
        maps = MAPS.read_text("utf-8", "surrogateescape")
    except OSError:
        return
    for start, end, path in _SHARED_READ_ONLY.findall(maps):
        if Path(path).parent in wanted:
            libc.madvise(int(start, 16), int(end, 16) - int(start, 16), _MADV_DONTNEED)


def keep_freed_memory() -> None:
    """Keep some megabytes of freed memory in the process.

    A photo needs a few arrays of about 100 KB for a millisecond. By default glibc returns that
    memory and gets it again page by page, each with a page fault: 120 faults took a twelfth of a
    photo's time (decision 0009). Without glibc this does nothing.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
        libc.mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)


class PackagePower:
    """Reads the energy of CPU packages from RAPL's counters; power is their difference over time.

    Without counters (virtual machines), or if only root may read them, figures are missing, not 0.
    """

    def __init__(
        self, folder: Path = POWERCAP, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock, self._last = clock, dict[Path, tuple[int, float]]()  # microjoules and time
        # Whole packages, not their parts or the platform.
        self._packages = [zone for zone in folder.glob("intel-rapl:*") if zone.name.count(":") == 1]
        self.watts()

    def watts(self) -> float | None:
        """Return all packages' mean power since the last call, in watts; None if unreadable."""
        total = 0.0
        for zone in self._packages:
            with suppress(OSError, ValueError):  # only root may read it
                if not (zone / "name").read_bytes().startswith(b"package"):
                    continue
                energy, at_s = _number(zone / "energy_uj"), self._clock()
                before, before_s = self._last.get(zone, (energy, at_s))
                self._last[zone] = energy, at_s
                if at_s > before_s:
                    # The counter wraps around at its maximum.
                    turned = _number(zone / "max_energy_range_uj") if energy < before else 0
                    total += (energy - before + turned) / 1e6 / (at_s - before_s)
        return round(total, 2) or None


def _number(file: Path) -> int:
    return int(file.read_text("ascii"))


class UseSample(NamedTuple):
    """The use of the machine since the sample before."""

    share: float  # of the cores, by the measured processes
    watts: float | None


@contextmanager
def sampled(every_s: float, cores: int, cpu_s: Callable[[], float]) -> Iterator[list[UseSample]]:
    """Sample the use of ``cores`` on a thread while the block runs, at least once.

    ``cpu_s`` returns the CPU time so far, in s.
    """
    samples, ended, power = list[UseSample](), threading.Event(), PackagePower()

    def sample() -> None:
        before_s, at_s, is_last = cpu_s(), time.perf_counter(), False
        while not is_last:
            is_last = ended.wait(every_s)
            if is_last and samples:  # too short
                return
            now_cpu_s, now_s = cpu_s(), time.perf_counter()
            share = max(0.0, now_cpu_s - before_s) / (now_s - at_s) / cores
            samples.append(UseSample(share, power.watts()))
            before_s, at_s = now_cpu_s, now_s

    with ThreadPoolExecutor(1) as pool:
        pool.submit(sample)
        try:
            yield samples
        finally:
            ended.set()


def describe_machine(further: Iterable[str] = ()) -> dict[str, Any]:
    """Return command, time, CPU and versions, to be stored with a result.

    The versions are of the service's main packages and of ``further`` ones, if installed.
    """
    packages = (DISTRIBUTION, *OF_A_SERVICE, *further)
    return {
        "command": " ".join(["tandem", *sys.argv[1:]]),
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "cores": available_cpus(),
        "python": platform.python_version(),
        "versions": {
            name: installed for name in packages if (installed := installed_version(name))
        },
    }


@contextmanager
def needs_extra(extra: str, what: str) -> Iterator[None]:
    """Turn a failing import in the block into an error that names the extra to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"tandem {what} needs {error.name}, which serving does not install; {_how_to(extra)}"
        ) from error


def pip_install(extra: str) -> str:
    """Return the command that installs an extra."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def _how_to(extra: str) -> str:
    return f"{pip_install(extra)} (in a checkout: pip install -c constraints.txt -e '.[{extra}]')"


def check_installed(package: str, extra: str, what: str) -> None:
    """Raise :class:`MissingExtraError` unless ``package`` is installed; does not import it."""
    if find_spec(package) is None:
        raise MissingExtraError(f"{what} needs {package}, which is not installed; {_how_to(extra)}")


def installed_version(package: str) -> str | None:
    """Return a package's version without a local build suffix; None if it is not installed."""
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return None
