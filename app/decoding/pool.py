"""The decoding processes of a Gateway."""

import asyncio
from collections.abc import Callable

from app.decoding.process import DecodeProcess, Photo
from models.image import ImageRule

CORES_EACH = 4  # whose networks one process keeps busy with photos; see DECISIONS.md


class DecodeProcesses:
    """Hands each photo to the process with the fewest; they are started when there first is one.

    So a service that nobody calls, or one client alone, has none.

    Args:
        num: of processes.
        rules: the distinct inputs that are made of a picture.
        max_pixels, max_full_pixels: as in the settings.

    """

    def __init__(
        self, num: int, rules: tuple[ImageRule, ...], max_pixels: int, max_full_pixels: int
    ) -> None:
        self._on_end: Callable[[], None] = lambda: None
        self._all = [
            DecodeProcess(rules, max_pixels, max_full_pixels, lambda: self._on_end())
            for _ in range(num)
        ]

    @property
    def num_open(self) -> int:
        """How many photos they have."""
        return sum(one.num_open for one in self._all)

    @property
    def num_busy(self) -> int:
        """How many processes have one."""
        return sum(one.num_open > 0 for one in self._all)

    @property
    def cpu_s(self) -> float:
        """The CPU time that they have taken, in s."""
        return sum(one.cpu_s for one in self._all)

    def tell(self, ended: Callable[[], None]) -> None:
        """Call ``ended`` on the loop whenever a photo has ended, and its future has a result."""
        self._on_end = ended

    def submit(self, data: bytes) -> asyncio.Future[Photo | None] | None:
        """Hand over a file; see :meth:`DecodeProcess.submit`."""
        least: DecodeProcess | None = None
        for one in self._all:
            if not one.is_ready:
                one.start()
            elif least is None or one.num_open < least.num_open:
                least = one
        return None if least is None else least.submit(data)

    def end_hung(self) -> None:
        """Kill those that do not end a photo; see :meth:`DecodeProcess.end_if_hung`."""
        for one in self._all:
            one.end_if_hung()

    def close(self) -> None:
        """End all."""
        for one in self._all:
            one.close()


def num_processes(asked: int | None, cores: int) -> int:
    """Return what was asked for, or what a Gateway needs whose networks have ``cores``."""
    return -(-cores // CORES_EACH) if asked is None else asked
