"""Memory that a process gives back once networks are compiled, and keeps while it decodes."""

import ctypes
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MAPS = Path("/proc/self/maps")
# Address range, permissions ("s": shared), and the path of what is mapped; proc_pid_maps(5).
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ \S+ +(/.+)")
_MADV_DONTNEED = 4  # Linux's; madvise(2)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's; mallopt(3)
KEPT_BYTES = 16 * 2**20  # at most, of what is free, by each thread's arena
MAPPED_BYTES = 4 * 2**20  # what is larger has a mapping of its own, which goes when it is freed


class _Mapping(NamedTuple):
    address: int
    num_bytes: int
    path: Path


def give_back_memory(*folders: Path) -> None:
    """Return what compiling has freed, and drop the pages of files in ``folders``.

    OpenVINO keeps the files that it compiled from mapped for as long as the network lives, though
    the kernels use copies of nearly all of them. A page that is used after all is mapped again from
    the system's cache. The bundled set's processes shrink by 55 MB and 135 MB
    (models/DECISIONS.md, "Memory of compiled networks"). Without glibc or /proc nothing is done.
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
    """Let freed memory stay with the process, some megabytes, instead of going at once.

    A photo takes a few arrays of some 100 KB, for a millisecond. glibc gives such memory back and
    gets it anew, page by page, each with a fault: 120 of them were a twelfth of the time that a
    photo takes (models/DECISIONS.md, "Memory of pictures"). Without glibc nothing is done.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
        libc.mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)


def _shared_read_only() -> Iterator[_Mapping]:
    """Yield mappings whose pages are the file's own: dropping them loses nothing."""
    try:
        lines = MAPS.read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        found = _MAPPING.fullmatch(line)
        if found and found[3] == "r--s":
            start, end = int(found[1], 16), int(found[2], 16)
            yield _Mapping(start, end - start, Path(found[4]))
