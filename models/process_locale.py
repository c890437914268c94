"""Keeps the process's locale while OpenVINO compiles networks on several threads.

``Core.compile_model`` (2026.4, with a compile cache) sets the process's locale to "C" for a moment.
If two threads do this at a time, the later one sees "C" and restores that. From then on ``open``
without an encoding, in Ray too, writes ASCII in place of UTF-8.
"""

import locale
import threading
from typing import Self


class KeptLocale:
    """A context manager that restores the locale from before the block.

    If blocks overlap, the last one to end restores the locale that the first one saw.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_within = 0
        self._before = ""

    def __enter__(self) -> Self:
        with self._lock:
            if not self._num_within:
                self._before = locale.setlocale(locale.LC_ALL)
            self._num_within += 1
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_within -= 1
            if not self._num_within:
                locale.setlocale(locale.LC_ALL, self._before)


kept_locale = KeptLocale()  # the locale belongs to the process
