"""The power of CPU packages, from RAPL's counters (the Linux kernel's ``powercap`` interface).

Where there are none (virtual machines, other CPUs) or where only root may read them, nothing is
told: no figure is not a figure of zero.
"""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

POWERCAP = Path("/sys/class/powercap")


class _Reading(NamedTuple):
    microjoules: int
    at_s: float


class PackagePower:
    """Reads every package's energy; power is the difference of two readings."""

    def __init__(
        self, folder: Path = POWERCAP, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._last: dict[str, _Reading] = {}
        self._zones = dict(_packages(folder))
        self.watts()

    def watts(self) -> dict[str, float]:
        """Return each readable package's mean power since the call before."""
        found = {}
        for name, zone in self._zones.items():
            with contextlib.suppress(OSError, ValueError):  # not ours to read
                now = _Reading(_number(zone / "energy_uj"), self._clock())
                before = self._last.get(name)
                self._last[name] = now
                if before is not None and now.at_s > before.at_s:
                    used = _used(before.microjoules, now.microjoules, zone)
                    found[name] = used / 1e6 / (now.at_s - before.at_s)
        return found


def _packages(folder: Path) -> list[tuple[str, Path]]:
    """Return name and folder of the zones that are whole packages, not a part or the platform."""
    found = []
    for zone in sorted(folder.glob("intel-rapl:*")):
        with contextlib.suppress(OSError):
            name = (zone / "name").read_text("ascii").strip()
            if zone.name.count(":") == 1 and name.startswith("package"):
                found.append((name, zone))
    return found


def _used(before: int, now: int, zone: Path) -> int:
    """Return the microjoules between two readings; the counter starts again after its largest."""
    return now - before if now >= before else now - before + _number(zone / "max_energy_range_uj")


def _number(file: Path) -> int:
    return int(file.read_text("ascii"))
