"""What a turn takes of the machine: CPU time by process, utilisation, memory, power."""

import threading
import time
from dataclasses import dataclass
from statistics import mean, pstdev
from typing import Any

import psutil
from machine import process_tree, pss_mb

from app.bench.measurement import cpu_seconds
from calibration.ladder.measure import PackagePower

EVERY_S = 0.25


class Utilisation:
    """Samples how busy the whole machine is, every quarter of a second, on a thread."""

    def __init__(self) -> None:
        self._samples: list[float] = []
        self._ended = threading.Event()
        psutil.cpu_percent()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(EVERY_S):
            self._samples.append(psutil.cpu_percent())

    def end(self) -> dict[str, float | None]:
        """Return mean and standard deviation in %, of all cores together."""
        self._ended.set()
        self._thread.join()
        whole = self._samples[1:]  # the first has the start in it
        return {
            "utilisation_percent": round(mean(whole), 1) if whole else None,
            "utilisation_deviation": round(pstdev(whole), 1) if whole else None,
        }


@dataclass(frozen=True)
class Snapshot:
    """The service's CPU time so far, by process."""

    at: float
    by_stage: dict[str, float]


class Service:
    """The processes of a service that runs on this machine."""

    def __init__(self, pid: int) -> None:
        self._root, self._power = psutil.Process(pid), PackagePower()

    def snapshot(self) -> Snapshot:
        return Snapshot(time.perf_counter(), cpu_seconds(self._root))

    def memory_mb(self) -> float:
        """Return the proportional set size of all its processes, in MB (10^6 bytes)."""
        return round(sum(pss_mb(process_tree(self._root.pid)).values()), 1)

    def watts(self) -> dict[str, float]:
        """Return each CPU package's mean power since the call before, where the machine tells."""
        return {name: round(watts, 1) for name, watts in self._power.watts().items()}


def cpu_ms(before: Snapshot, after: Snapshot, images: int) -> dict[str, Any]:
    """Return the service's CPU-ms of an image, and how they are shared out."""
    stages = {
        stage: round((seconds - before.by_stage.get(stage, 0.0)) / max(images, 1) * 1e3, 3)
        for stage, seconds in after.by_stage.items()
    }
    return {"server_cpu_ms": round(sum(stages.values()), 3), "server_cpu_ms_by_process": stages}
