"""Measures calls of a network: throughput, latency, CPU time, utilisation and memory.

Every caller is a thread that makes one call after another (a closed loop). Networks release the
GIL, so callers run in parallel.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median, pstdev

import psutil

from calibration.ladder.rung import Figures, RungError

SAMPLES = 40  # of utilisation in a run, at most
MIN_SAMPLE_S = 0.1  # a virtual machine's clock is too noisy for shorter samples
WARM_UP = 0.2  # of a run's time
SMAPS = Path("/proc/self/smaps_rollup")
MIB = 2**20
NetworkCall = Callable[[], object]


@dataclass
class Calls:
    """The measurements of one run's calls."""

    seconds: float
    latencies_s: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    utilisation: list[float] = field(default_factory=list)  # as shares of the cores


def run_calls(calls: Sequence[NetworkCall], seconds: float, cores: int) -> Calls:
    """Repeat each of ``calls`` for ``seconds``, each in its own thread.

    Every thread makes at least one call, however long it takes. An exception in a call ends the
    run.
    """
    latencies: list[list[float]] = [[] for _ in calls]
    errors: list[BaseException] = []
    started, cpu_before = time.perf_counter(), time.process_time()

    def caller(call: NetworkCall, own: list[float]) -> None:
        try:
            while not errors:
                begun = time.perf_counter()
                call()
                now = time.perf_counter()
                own.append(now - begun)
                if now - started >= seconds:
                    return
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=caller, args=(call, own), daemon=True)
        for call, own in zip(calls, latencies, strict=True)
    ]
    with _sampled(max(MIN_SAMPLE_S, seconds / SAMPLES), cores) as shares:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        taken, cpu_s = time.perf_counter() - started, time.process_time() - cpu_before
    if errors:
        raise errors[0]
    return Calls(taken, [latency for own in latencies for latency in own], cpu_s, shares)


@contextmanager
def _sampled(every_s: float, cores: int) -> Iterator[list[float]]:
    """Sample the process's utilisation on a thread while the block runs."""
    shares, ended = list[float](), threading.Event()

    def sample() -> None:
        cpu_s, at_s = time.process_time(), time.perf_counter()
        while not ended.wait(every_s):
            now_cpu_s, now_s = time.process_time(), time.perf_counter()
            shares.append((now_cpu_s - cpu_s) / (now_s - at_s) / cores)
            cpu_s, at_s = now_cpu_s, now_s

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield shares
    finally:
        ended.set()
        thread.join()


def figures_of(run: Calls, batch: int, cores: int) -> Figures:
    """Return a run's figures; ``batch`` is the number of images per call."""
    if not run.latencies_s:
        raise RungError("no call ended: there is nothing to measure")
    num_images = batch * len(run.latencies_s)
    shares = run.utilisation or [run.cpu_s / run.seconds / cores]
    pss, rss = memory_mib()
    return Figures(
        images_per_s=round(num_images / run.seconds, 3),
        p50_ms=round(median(run.latencies_s) * 1e3, 3),
        cpu_ms_per_image=round(run.cpu_s / num_images * 1e3, 3),
        utilisation=round(fmean(shares), 4),
        utilisation_spread=round(pstdev(shares), 4),
        pss_mib=pss,
        rss_mib=rss,
        num_images=num_images,
        seconds=round(run.seconds, 3),
    )


def memory_mib(smaps: Path = SMAPS) -> tuple[float | None, float]:
    """Return this process's PSS (None if the kernel hides it) and RSS, in MiB."""
    rss = round(psutil.Process(os.getpid()).memory_info().rss / MIB, 1)
    try:
        lines = smaps.read_text("ascii").splitlines()
    except OSError:
        return None, rss
    sizes = [int(line.split()[1]) for line in lines if line.startswith("Pss:")]
    return (round(sizes[0] / 1024, 1) if sizes else None), rss
