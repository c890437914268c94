"""The power of CPU packages, from RAPL's counters (the Linux kernel's ``powercap`` interface).

Where there are none (virtual machines, other CPUs) or where only root may read them, nothing is
told: no figure is not a figure of zero.
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
        self._last: dict[str, tuple[int, float]] = {}  # microjoules, and when
        self._zones = dict(_packages(folder))
        self.watts()

    def watts(self) -> dict[str, float]:
        """Return each readable package's mean power since the call before."""
        found = {}
        for name, zone in self._zones.items():
            with contextlib.suppress(OSError, ValueError):  # not ours to read
                energy, at_s = _number(zone / "energy_uj"), self._clock()
                before, before_s = self._last.get(name, (energy, at_s))
                self._last[name] = energy, at_s
                if at_s > before_s:
                    # The counter starts again after its largest.
                    turned = _number(zone / "max_energy_range_uj") if energy < before else 0
                    found[name] = (energy - before + turned) / 1e6 / (at_s - before_s)
        return found

    def total_watts(self) -> float | None:
        """Return the power of all packages since the call before; None: it is not shown."""
        total = sum(self.watts().values())
        return round(total, 2) if total else None


def _packages(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield name and folder of the zones that are whole packages, not a part or the platform."""
    for zone in sorted(folder.glob("intel-rapl:*")):
        with contextlib.suppress(OSError):
            name = (zone / "name").read_text("ascii").strip()
            if zone.name.count(":") == 1 and name.startswith("package"):
                yield name, zone


def _number(file: Path) -> int:
    return int(file.read_text("ascii"))
