"""Runs a ladder: its rungs one after another, each in a process, the last as a service.

It measures throughput, latency, CPU time, utilisation, power and memory of each. Every caller is a
thread that makes one call after another (a closed loop); networks release the GIL.
"""

import json
import logging
import os
import random
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from operator import itemgetter
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

import httpx
import numpy as np
import psutil

from calibration.ladder.rungs import (
    MADE_ONCE,
    PHOTOS,
    SERVICE,
    TRUTH,
    Choices,
    Figures,
    LadderError,
    LadderJob,
    Preparation,
    Rung,
    RungOptions,
    RungResult,
    Say,
    Store,
)
from models.child_process import Child, ChildDiedError, last_words, run_apart
from models.ensemble import PlanName
from models.errors import TandemError
from models.machine import UseSample, sampled

TANDEM = str(Path(sys.executable).with_name("tandem"))
OVERHEAD_S = 15.0  # of a rung in addition to measuring, before a rung was seen
START_LIMIT_S = 240.0  # to import, build, compile and try choices, or to serve; slow machines
END_LIMIT_S = 120.0  # after a run's time: the labelled images, the end of the load
STOP_S = 60.0
SAMPLE_S = 0.5
CLIENTS_PER_CORE = 8
WARM_UP = 0.3  # of the service's run
PORTS = range(20_000, 30_000)  # the kernel, Ray's workers and replicas do not use these
RunTask = Callable[[LadderJob, str, str, Choices, Say], RungResult]


def run_engine(job: LadderJob, name: str, task: str, choices: Choices, say: Say) -> RungResult:
    """Run an engine, a preparation or the service; a process's end or timeout is a result too.

    ``say`` is called with the process's progress.
    """
    reason = f"it was not ready to run within {START_LIMIT_S:g} s: given up"
    late = RungResult(outcome="skipped", reason=reason)  # a network too large for so few cores

    def heard(doing: str) -> float | None:
        nonlocal late
        say(doing)
        if doing != "measuring":
            return None
        late = _failed("it did not end long after its time: given up")
        return 3 * job.seconds + END_LIMIT_S

    if task == SERVICE:
        return run_service_rung(job, choices[0].plan)
    log, arguments = Store(job.work).log(name), (run_in_child, job, task, choices)
    try:
        with log.open("wb") as printed:
            result: RungResult = run_apart(
                *arguments, heard=heard, limit_s=START_LIMIT_S, printed=printed
            )
    except TimeoutError:
        return late
    except ChildDiedError as error:
        return _failed(f"its process died ({error}): {last_words(log)}")
    return result


def _failed(reason: str) -> RungResult:
    return RungResult(outcome="failed", reason=reason)


class Ladder:
    """Runs rungs, each once; ``run`` starts a process for each, unless tests need another."""

    def __init__(
        self,
        job: LadderJob,
        report: Say = lambda _: None,
        run: RunTask | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job, self._report, self._clock = job, report, clock
        self._store, self._run = Store(job.work), run or run_engine
        self._results: dict[str, RungResult] = {}
        self._took_s: list[float] = []

    def run(self, *, is_resumed: bool) -> dict[str, RungResult]:
        """Return every rung's result, in the ladder's order; resumed, it keeps earlier results.

        Raises :class:`LadderError` if the network cannot be made, or the labelled images or the
        work folder cannot be used.
        """
        with self._store.opened(self._job.facts, is_resumed=is_resumed):
            if self._num_pending(1):
                self._prepare_network()
            for number, rung in enumerate(self._job.rungs, start=1):
                if (result := self._store.read(rung.name)) is None:
                    result = self._measure(rung, number)
                    self._store.write(rung.name, result)
                self._results[rung.name] = result
            if not any(result.outcome == "failed" for result in self._results.values()):
                self._store.remove_networks()
        return self._results

    def _prepare_network(self) -> None:
        """Make the inputs of every rung: the network with random weights, the labelled pixels."""
        first = next(rung for rung in self._job.rungs if self._store.read(rung.name) is None)
        needed = dict[Preparation, str]()
        if self._job.network.is_random:
            needed["make_set"] = "making the network"
        if self._job.images is not None:
            needed["labelled"] = "reading the labelled images"
        for preparation, doing in needed.items():
            self._tell(first, 1, doing)
            if reason := self._not_prepared(preparation, lambda _: None):
                raise LadderError(reason)

    def _not_prepared(self, preparation: Preparation, say: Say) -> str:
        """Make a preparation unless it exists; return why it failed, or ""."""
        name = f"{MADE_ONCE}{preparation}"
        if self._store.read(name) is not None:
            return ""
        result = self._run(self._job, name, preparation, (), say)
        if result.outcome != "prepared":
            return result.reason
        self._store.write(name, result)
        return ""

    def _measure(self, rung: Rung, number: int) -> RungResult:
        if why := self._job.impossible.get(rung.name):
            return RungResult(outcome="skipped", reason=why)
        started, say = self._clock(), partial(self._tell, rung, number)
        say("starting")
        try:
            if rung.needs is not None:
                say(f"preparing: {rung.needs}")
                if reason := self._not_prepared(rung.needs, say):
                    return RungResult(outcome="skipped", reason=reason)
            choices = rung.choices(self._base(rung))
            result = self._run(self._job, rung.name, rung.engine, choices, say)
        except TandemError as error:
            result = _failed(error.message)
        if result.outcome == "measured":
            self._took_s.append(self._clock() - started)
        return result

    def _base(self, rung: Rung) -> RungOptions:
        """Return the options of the fastest earlier rung of the engine; the service's plan."""
        if rung.engine == SERVICE:
            return self._results.get("fast", RungResult(outcome="skipped")).chosen
        engines = {earlier.name: earlier.engine for earlier in self._job.rungs}
        of_engine = [r for name, r in self._results.items() if engines[name] == rung.engine]
        measured = [(r.figures.images_per_s, r.chosen) for r in of_engine if r.figures is not None]
        return max(measured, key=itemgetter(0), default=(0.0, RungOptions()))[1]

    def _tell(self, rung: Rung, number: int, doing: str) -> None:
        """Report the progress; the time left is estimated by what the rungs before took."""
        mean_s = fmean(self._took_s or [self._job.seconds + OVERHEAD_S])
        left_s = self._num_pending(number) * mean_s
        place = f"{number} of {len(self._job.rungs)}, about {left_s:.0f} s left"
        self._report(f"{place}: {rung.title}: {doing}")

    def _num_pending(self, number: int) -> int:
        """Return how many rungs, from the ``number``-th, are still to be measured."""
        return sum(
            rung.name not in self._job.impossible and self._store.read(rung.name) is None
            for rung in self._job.rungs[number - 1 :]
        )


def run_service_rung(job: LadderJob, plan: PlanName) -> RungResult:
    """Start ``tandem serve`` with the ladder's set, load it with ``tandem bench``, and stop it.

    The configuration is the default of ``tandem serve`` without the cache, on a free port of
    loopback, by ``plan``.
    """
    port, log = free_port(), Store(job.work).log(SERVICE)
    line = [TANDEM, "serve", "--model-set", str(job.network.model_set), "--allow-unverified"]
    line += ["--host", "127.0.0.1", "--port", str(port)]
    environment = os.environ | {"TANDEM_CACHE": "none", "TANDEM_PLAN": plan}
    started, url = time.monotonic(), f"http://127.0.0.1:{port}"
    try:
        with log.open("wb") as printed, Child(line, printed, environment=environment) as process:
            try:
                if problem := _wait_ready(url, process):
                    return _failed(f"{problem}: {last_words(log)}")
                prepared_s = time.monotonic() - started
                figures = _loaded(job, url, process.pid)
                figures = figures.model_copy(update=_top1(job, url))
            finally:
                process.interrupt(STOP_S)  # as Ctrl-C does
    except (httpx.HTTPError, OSError, psutil.Error) as error:
        why = str(error) or type(error).__name__
        raise LadderError(f"the service could not be measured to the end: {why}") from error
    clients = CLIENTS_PER_CORE * job.cores
    return RungResult(
        outcome="measured",
        chosen=RungOptions(callers=clients, precision="INT8", plan=plan),
        figures=figures,
        prepared_s=round(prepared_s, 1),
        notes=(f"{clients} clients, JPEGs; decoding and HTTP are in it; plan {plan}",),
    )


def free_port() -> int:
    """Return a free port of the loopback interface."""
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise LadderError(f"no port of {PORTS[0]} to {PORTS[-1]} is free for the service")


def _wait_ready(url: str, process: Child) -> str:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        if process.has_ended(SAMPLE_S):
            return f"the service ended ({process.how_ended()})"
        with suppress(httpx.HTTPError):
            if httpx.get(f"{url}/readyz", timeout=5, trust_env=False).status_code == 200:
                return ""
    return f"the service was not ready within {START_LIMIT_S:g} s"


def _loaded(job: LadderJob, url: str, pid: int) -> Figures:
    seconds, result_file, log = job.seconds, job.work / "bench.json", Store(job.work).log("bench")
    result_file.unlink(missing_ok=True)
    line = [TANDEM, "bench", "--url", url, "--json", str(result_file)]
    line += ["--concurrency", str(CLIENTS_PER_CORE * job.cores), "--objective-ms", "1000"]
    line += ["--duration", f"{max(0.1, seconds)}", "--warm-up", f"{max(1.0, WARM_UP * seconds)}"]
    if job.has_images:
        line += ["--images", str(job.work / PHOTOS)]
    with (
        log.open("wb") as printed,
        Child(line, printed) as bench,
        sampled(SAMPLE_S, job.cores, lambda: sum(map(_cpu_s, _family(pid)))) as samples,
    ):
        bench.has_ended(seconds * (1 + WARM_UP) + END_LIMIT_S)
        how = bench.how_ended()
    try:
        (run,) = json.loads(result_file.read_text("utf-8"))["runs"]
    except (OSError, ValueError, KeyError):
        raise LadderError(f"tandem bench failed ({how}): {last_words(log)}") from None
    if not run["num_ok"]:
        errors = ", ".join(f"{number} {kind}" for kind, number in run["errors"].items())
        raise LadderError(f"the service answered nothing: {errors or 'no request ended'}")
    of_run = samples[-max(1, int(seconds / SAMPLE_S)) :]  # without its start and warm-up
    cpu_ms = run["service_cpu_ms"] or 0.0
    return Figures(
        images_per_s=run["images_per_s"],
        p50_ms=run["p50_ms"],
        cpu_ms_per_image=cpu_ms,
        utilisation=round(run["images_per_s"] * cpu_ms / 1e3 / job.cores, 4),
        num_images=run["num_ok"],
        seconds=run["duration_s"],
        **of_machine(of_run, _family(pid)),
    )


def _family(pid: int) -> list[psutil.Process]:
    """Return a process and its descendants; nothing if it has ended."""
    with suppress(psutil.Error):
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    return []


def _cpu_s(process: psutil.Process) -> float:
    with suppress(psutil.Error):
        return sum(process.cpu_times()[:2])  # user and system
    return 0.0


def _top1(job: LadderJob, url: str) -> dict[str, float]:
    """Send every labelled image to the service; return the fields of :class:`Figures`."""
    if not job.has_images:
        return {}
    truth, num_right = np.load(job.work / TRUTH, allow_pickle=False).tolist(), 0
    with httpx.Client(base_url=url, timeout=30, trust_env=False) as client:
        for link, index in zip(sorted((job.work / PHOTOS).iterdir()), truth, strict=True):
            path = link.readlink()
            answer = client.post("/v1/classify", params={"top_k": 1}, content=path.read_bytes())
            if answer.status_code != 200:
                raise LadderError(f"{path}: the service answers {answer.text[:300]}")
            num_right += answer.json()["predictions"][0]["index"] == index
    return {"top1": round(num_right / len(truth), 4), "num_labelled": len(truth)}


SAMPLES = 40  # of utilisation in a run, at most
MIN_SAMPLE_S = 0.1  # a virtual machine's clock is too noisy for shorter samples
MIB = 2**20
OOM_SCORE = Path("/proc/self/oom_score_adj")


def of_machine(samples: Sequence[UseSample], processes: Sequence[psutil.Process]) -> dict[str, Any]:
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
    latencies_s: Sequence[float], taken_s: float, cpu_s: float, samples: list[UseSample], batch: int
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
