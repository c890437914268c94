"""The measurements of a rung: throughput, latency, CPU time, utilisation, power and memory.

Every caller is a thread that makes one call after another (a closed loop); networks release the
GIL.
"""

import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any, NamedTuple

import psutil

from calibration.ladder.rungs import Choices, Figures, LadderJob, RungResult, Say

SAMPLES = 40  # of utilisation in a run, at most
MIN_SAMPLE_S = 0.1  # a virtual machine's clock is too noisy for shorter samples
MIB = 2**20
POWERCAP = Path("/sys/class/powercap")
OOM_SCORE = Path("/proc/self/oom_score_adj")


class PackagePower:
    """Reads the energy of CPU packages from RAPL's counters; power is their difference over time.

    Without counters (virtual machines), or if only root may read them, figures are missing, not 0.
    """

    def __init__(
        self, folder: Path = POWERCAP, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock, self._last = clock, dict[Path, tuple[int, float]]()  # microjoules and time
        # Whole packages, not their parts or the platform.
        self._packages = [zone for zone in folder.glob("intel-rapl:*") if zone.name.count(":") == 1]
        self.watts()

    def watts(self) -> float | None:
        """Return all packages' mean power since the last call, in watts; None if unreadable."""
        total = 0.0
        for zone in self._packages:
            with suppress(OSError, ValueError):  # only root may read it
                if not (zone / "name").read_bytes().startswith(b"package"):
                    continue
                energy, at_s = _number(zone / "energy_uj"), self._clock()
                before, before_s = self._last.get(zone, (energy, at_s))
                self._last[zone] = energy, at_s
                if at_s > before_s:
                    # The counter wraps around at its maximum.
                    turned = _number(zone / "max_energy_range_uj") if energy < before else 0
                    total += (energy - before + turned) / 1e6 / (at_s - before_s)
        return round(total, 2) or None


def _number(file: Path) -> int:
    return int(file.read_text("ascii"))


class Sample(NamedTuple):
    """The use of the machine since the sample before."""

    share: float  # of the cores, by the measured processes
    watts: float | None


@contextmanager
def sampled(every_s: float, cores: int, cpu_s: Callable[[], float]) -> Iterator[list[Sample]]:
    """Sample the use of ``cores`` on a thread while the block runs, at least once.

    ``cpu_s`` returns the CPU time so far, in s.
    """
    samples, ended, power = list[Sample](), threading.Event(), PackagePower()

    def sample() -> None:
        before_s, at_s, is_last = cpu_s(), time.perf_counter(), False
        while not is_last:
            is_last = ended.wait(every_s)
            if is_last and samples:  # too short
                return
            now_cpu_s, now_s = cpu_s(), time.perf_counter()
            share = max(0.0, now_cpu_s - before_s) / (now_s - at_s) / cores
            samples.append(Sample(share, power.watts()))
            before_s, at_s = now_cpu_s, now_s

    with ThreadPoolExecutor(1) as pool:
        pool.submit(sample)
        try:
            yield samples
        finally:
            ended.set()


def of_machine(samples: Sequence[Sample], processes: Sequence[psutil.Process]) -> dict[str, Any]:
    """Return the fields of :class:`Figures` on the use and memory of the measured processes."""
    pss_mib, rss_mib = memory_mib(processes)
    watts = [sample.watts for sample in samples if sample.watts is not None]
    return {
        "utilisation_spread": round(pstdev(sample.share for sample in samples), 4),
        "pss_mib": pss_mib,
        "rss_mib": rss_mib,
        "watts": round(fmean(watts), 2) if watts else None,
    }


def run_calls(
    calls: Sequence[Callable[[], object]], seconds: float, batch: int, cores: int
) -> Figures:
    """Repeat each of ``calls`` for ``seconds``, each in its own thread; ``batch`` images a call.

    Every thread makes at least one call, however long it takes. An exception in a call ends the
    run.
    """
    has_failed, started, cpu_before = threading.Event(), time.perf_counter(), time.process_time()

    def caller(call: Callable[[], object]) -> list[float]:
        latencies_s, now = list[float](), started
        try:
            while not latencies_s or (now - started < seconds and not has_failed.is_set()):
                begun = time.perf_counter()
                call()
                now = time.perf_counter()
                latencies_s.append(now - begun)
        except BaseException:
            has_failed.set()
            raise
        return latencies_s

    every_s = max(MIN_SAMPLE_S, seconds / SAMPLES)
    with (
        sampled(every_s, cores, time.process_time) as samples,
        ThreadPoolExecutor(len(calls)) as pool,
    ):
        latencies_s = [latency for of_call in pool.map(caller, calls) for latency in of_call]
        taken_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_before
    return figures_of(latencies_s, taken_s, cpu_s, samples, batch)


def figures_of(
    latencies_s: Sequence[float], taken_s: float, cpu_s: float, samples: list[Sample], batch: int
) -> Figures:
    """Return the figures of calls with ``batch`` images."""
    num_images = batch * len(latencies_s)
    return Figures(
        images_per_s=round(num_images / taken_s, 3),
        p50_ms=round(median(latencies_s) * 1e3, 3),
        cpu_ms_per_image=round(cpu_s / num_images * 1e3, 3),
        utilisation=round(fmean(sample.share for sample in samples), 4),
        num_images=num_images,
        seconds=round(taken_s, 3),
        **of_machine(samples, [psutil.Process()]),
    )


def memory_mib(processes: Sequence[psutil.Process]) -> tuple[float | None, float]:
    """Return the PSS (None if the kernel hides it) and RSS of processes, in MiB."""
    pss = rss = 0
    for process in processes:
        with suppress(psutil.Error):  # it has ended
            info = process.memory_full_info()
            pss, rss = pss + getattr(info, "pss", 0), rss + info.rss
    return round(pss / MIB, 1) or None, round(rss / MIB, 1)


def run_in_child(job: LadderJob, task: str, choices: Choices, say: Say) -> RungResult:
    """Return a task's outcome in a process of its own, without the runtimes' warnings."""
    from calibration.ladder.engines import outcome_of  # the ladder's own process needs no runtime

    with suppress(OSError):  # then this process is killed first if memory runs out
        OOM_SCORE.write_text("500", "ascii")
    warnings.simplefilter("ignore")  # torch deprecates features that OpenVINO and the rungs use
    logging.disable(logging.ERROR)
    return outcome_of(job, task, choices, say)
