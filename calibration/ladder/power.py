"""The power of CPU packages, from RAPL's counters (the Linux kernel's ``powercap`` interface).

If there are none (virtual machines, other CPUs), or if only root may read them, the figure is
missing, not zero.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")


class PackagePower:
    """Reads every package's energy; power is the difference of two readings."""

    def __init__(
        self, folder: Path = POWERCAP, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._last: dict[str, tuple[int, float]] = {}  # microjoules and time
        self._zones = dict(_packages(folder))
        self.watts()

    def watts(self) -> dict[str, float]:
        """Return each readable package's mean power since the last call, in watts."""
        power = {}
        for name, zone in self._zones.items():
            with contextlib.suppress(OSError, ValueError):  # only root may read it
                energy, at_s = _number(zone / "energy_uj"), self._clock()
                before, before_s = self._last.get(name, (energy, at_s))
                self._last[name] = energy, at_s
                if at_s > before_s:
                    # The counter wraps around at its maximum.
                    turned = _number(zone / "max_energy_range_uj") if energy < before else 0
                    power[name] = (energy - before + turned) / 1e6 / (at_s - before_s)
        return power

    def total_watts(self) -> float | None:
        """Return the power of all packages since the last call, in watts; None if unreadable."""
        total = sum(self.watts().values())
        return round(total, 2) if total else None


def _packages(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield name and folder of each zone that is a whole package, not a part or the platform."""
    for zone in sorted(folder.glob("intel-rapl:*")):
        with contextlib.suppress(OSError):
            name = (zone / "name").read_text("ascii").strip()
            if zone.name.count(":") == 1 and name.startswith("package"):
                yield name, zone


def _number(file: Path) -> int:
    return int(file.read_text("ascii"))
