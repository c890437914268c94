"""The measurements in a rung's process: throughput, latency, CPU time, utilisation, power, memory.

Every caller is a thread that makes one call after another (a closed loop); networks release the
GIL.
"""

import contextlib
import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median, pstdev

import psutil

from calibration.ladder.rungs import (
    Engine,
    Figures,
    LadderJob,
    Preparation,
    RungOptions,
    RungResult,
)

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


@contextmanager
def sampled(every_s: float, cores: int, cpu_s: Callable[[], float]) -> Iterator[list[float]]:
    """Sample the utilisation of ``cores`` on a thread while the block runs.

    ``cpu_s`` returns the CPU time so far, in s.
    """
    shares, ended = list[float](), threading.Event()

    def sample() -> None:
        before_s, at_s = cpu_s(), time.perf_counter()
        while not ended.wait(every_s):
            now_cpu_s, now_s = cpu_s(), time.perf_counter()
            shares.append(max(0.0, now_cpu_s - before_s) / (now_s - at_s) / cores)
            before_s, at_s = now_cpu_s, now_s

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield shares
    finally:
        ended.set()
        thread.join()


def run_calls(
    calls: Sequence[Callable[[], object]], seconds: float, batch: int, cores: int
) -> Figures:
    """Repeat each of ``calls`` for ``seconds``, each in its own thread; ``batch`` images a call.

    Every thread makes at least one call, however long it takes. An exception in a call ends the
    run.
    """
    latencies_s: list[float] = []
    errors: list[BaseException] = []
    power, started, cpu_before = PackagePower(), time.perf_counter(), time.process_time()

    def caller(call: Callable[[], object]) -> None:
        try:
            while not errors:
                begun = time.perf_counter()
                call()
                now = time.perf_counter()
                latencies_s.append(now - begun)
                if now - started >= seconds:
                    return
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=caller, args=(call,), daemon=True) for call in calls]
    with sampled(max(MIN_SAMPLE_S, seconds / SAMPLES), cores, time.process_time) as shares:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        taken_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_before
        watts = power.total_watts()
    if errors:
        raise errors[0]
    figures = figures_of(latencies_s, taken_s, cpu_s, shares, batch=batch, cores=cores)
    return figures.model_copy(update={"watts": watts})


def figures_of(
    latencies_s: Sequence[float],
    taken_s: float,
    cpu_s: float,
    shares: Sequence[float],
    *,
    batch: int,
    cores: int,
) -> Figures:
    """Return the figures of calls with ``batch`` images; ``shares`` are samples of utilisation."""
    num_images, shares = batch * len(latencies_s), shares or [cpu_s / taken_s / cores]
    pss_mib, rss_mib = memory_mib([psutil.Process()])
    return Figures(
        images_per_s=round(num_images / taken_s, 3),
        p50_ms=round(median(latencies_s) * 1e3, 3),
        cpu_ms_per_image=round(cpu_s / num_images * 1e3, 3),
        utilisation=round(fmean(shares), 4),
        utilisation_spread=round(pstdev(shares), 4),
        pss_mib=pss_mib,
        rss_mib=rss_mib,
        num_images=num_images,
        seconds=round(taken_s, 3),
    )


def memory_mib(processes: Sequence[psutil.Process]) -> tuple[float | None, float]:
    """Return the PSS (None if the kernel hides it) and RSS of processes, in MiB."""
    pss = rss = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):  # it has ended
            info = process.memory_full_info()
            pss, rss = pss + getattr(info, "pss", 0), rss + info.rss
    return round(pss / MIB, 1) or None, round(rss / MIB, 1)


def run_in_child(
    job: LadderJob,
    engine: Engine | Preparation,
    choices: Sequence[RungOptions],
    say: Callable[[str], None],
) -> RungResult:
    """Return the engine's outcome in a process of its own, without the runtimes' warnings."""
    from calibration.ladder.engines import outcome_of  # the ladder's own process needs no runtime

    with contextlib.suppress(OSError):  # then this process is killed first if memory runs out
        OOM_SCORE.write_text("500", "ascii")
    warnings.simplefilter("ignore")  # torch deprecates features that OpenVINO and the rungs use
    logging.disable(logging.ERROR)
    return outcome_of(job, engine, choices, say)
