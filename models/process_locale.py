"""Keeps the locale of the process while OpenVINO compiles networks on several threads.

``Core.compile_model`` (2026.4, with a compile cache) sets the locale to "C" for a moment, and the
locale is the process's: of two threads that do so at a time the later one finds "C", and puts that
back. From then on ``open`` without an encoding, Ray's too, writes ASCII where it wrote UTF-8.
"""

import locale
import threading
from typing import Self


class KeptLocale:
    """A context manager that puts back the locale which was there before the block.

    Of blocks that overlap the last one to end puts back what the first one found.
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


kept_locale = KeptLocale()  # the process has one locale
