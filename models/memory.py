"""Returns memory to the system after compiling, and keeps freed memory for decoding."""

import ctypes
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MAPS = Path("/proc/self/maps")
# Address range, permissions ("s": shared), and the mapped file's path; proc_pid_maps(5).
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ \S+ +(/.+)")
_MADV_DONTNEED = 4  # Linux's; madvise(2)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's; mallopt(3)
KEPT_BYTES = 16 * 2**20  # of freed memory, at most, in each thread's arena
MAPPED_BYTES = 4 * 2**20  # larger allocations get their own mapping, which is returned when freed


class _Mapping(NamedTuple):
    address: int
    num_bytes: int
    path: Path


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
    for mapping in _shared_read_only():
        if mapping.path.parent in wanted:
            libc.madvise(mapping.address, mapping.num_bytes, _MADV_DONTNEED)


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


def _shared_read_only() -> Iterator[_Mapping]:
    """Yield read-only mappings of files, whose pages can be dropped without loss."""
    try:
        lines = MAPS.read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        match = _MAPPING.fullmatch(line)
        if match and match[3] == "r--s":
            start, end = int(match[1], 16), int(match[2], 16)
            yield _Mapping(start, end - start, Path(match[4]))
