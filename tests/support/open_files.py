"""Which files this process has open, so that a test can tell what was opened and not closed."""

import contextlib
import gc
import os


def open_files() -> set[tuple[str, str]]:
    """The number and the target of every open descriptor.

    The difference of two such sets is what was opened in between and is still open. Garbage is
    collected first: what earlier tests left open counts in neither.
    """
    gc.collect()
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):  # noqa: PTH208 - the numbers, not paths
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found.add((descriptor, os.readlink(f"/proc/self/fd/{descriptor}")))  # noqa: PTH115
    return found
