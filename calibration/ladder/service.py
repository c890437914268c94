"""The last rung: the service over HTTP, which the ``tandem`` command starts, loads and stops."""

import json
import os
import random
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import httpx
import psutil

from calibration.ladder.job import LadderJob
from calibration.ladder.measure import MIB
from calibration.ladder.power import PackagePower
from calibration.ladder.process import child
from calibration.ladder.rung import (
    LABELLED_FILES,
    Figures,
    LadderError,
    RungOptions,
    RungResult,
)
from calibration.ladder.store import Store
from models.child_process import Child, last_words

TANDEM = str(Path(sys.executable).with_name("tandem"))
START_S = 240.0
STOP_S = 60.0
LOAD_LIMIT_S = 120.0  # after a run's time
SAMPLE_S = 0.5
CLIENTS_PER_CORE = 8
WARM_UP = 0.3  # of a run's time
# The kernel, Ray's workers and replicas do not use these.
PORTS = range(20_000, 30_000)


def run_service_rung(job: LadderJob, store: Store, cascade_margin: float | None) -> RungResult:
    """Start ``tandem serve`` with the ladder's set, load it with ``tandem bench``, and stop it.

    The configuration is the default of ``tandem serve`` without the cache, on a free port of
    loopback, with ``cascade_margin`` if it is not None.
    """
    port, log = free_port(), store.log("service")
    url = f"http://127.0.0.1:{port}"
    line = [TANDEM, "serve", "--model-set", str(job.network.model_set), "--allow-unverified"]
    line += ["--host", "127.0.0.1", "--port", str(port)]
    environment = os.environ | {"TANDEM_CACHE": "none"}
    if cascade_margin is not None:
        environment["TANDEM_CASCADE_MARGIN"] = str(cascade_margin)
    started = time.monotonic()
    with log.open("wb") as printed, child(line, printed, environment=environment) as process:
        try:
            if problem := _wait_ready(url, process):
                return RungResult(outcome="failed", reason=f"{problem}: {last_words(log)}")
            prepared_s = time.monotonic() - started
            figures = _measured(job, store, url, psutil.Process(process.pid))
            figures = figures.model_copy(update=_top1(url, store.folder))
        except (httpx.HTTPError, OSError, psutil.Error) as error:
            why = str(error) or type(error).__name__
            raise LadderError(f"the service could not be measured to the end: {why}") from error
        finally:
            process.interrupt(STOP_S)  # as Ctrl-C does
    clients = CLIENTS_PER_CORE * job.cores
    margin = "no cascade" if cascade_margin is None else f"cascade_margin {cascade_margin:g}"
    return RungResult(
        outcome="measured",
        chosen=RungOptions(callers=clients, precision="INT8", cascade_margin=cascade_margin),
        figures=figures,
        prepared_s=round(prepared_s, 1),
        notes=(f"{clients} clients, JPEGs; decoding and HTTP are in it; {margin}",),
    )


def free_port() -> int:
    """Return a free port of the loopback interface."""
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise LadderError(f"no port of {PORTS[0]} to {PORTS[-1]} is free for the service")


def _wait_ready(url: str, process: Child) -> str:
    """Wait until the service is ready; return an error with the log's reason if it is not."""
    deadline = time.monotonic() + START_S
    with httpx.Client(base_url=url, timeout=5, trust_env=False) as client:
        while time.monotonic() < deadline:
            if process.has_ended(SAMPLE_S):
                return f"the service ended ({process.how_ended()})"
            with suppress(httpx.HTTPError):
                if client.get("/readyz").status_code == 200:
                    return ""
    return f"the service was not ready within {START_S:g} s"


def _measured(job: LadderJob, store: Store, url: str, service: psutil.Process) -> Figures:
    """Load the service for the time of a rung, and return the figures."""
    seconds, log = job.asked.seconds, store.log("bench")
    result_file = store.folder / "bench.json"
    result_file.unlink(missing_ok=True)
    line = [TANDEM, "bench", "--url", url, "--json", str(result_file)]
    line += ["--concurrency", str(CLIENTS_PER_CORE * job.cores), "--objective-ms", "1000"]
    line += ["--duration", f"{max(0.1, seconds)}", "--warm-up", f"{max(1.0, WARM_UP * seconds)}"]
    with (
        _photos(store.folder) as options,
        log.open("wb") as printed,
        child([*line, *options], printed) as bench,
    ):
        shares, watts = _followed(bench, service, job)
        how = bench.how_ended()
    run = _run_in(result_file)
    if run is None:
        raise LadderError(f"tandem bench failed ({how}): {last_words(log)}")
    if not run["num_ok"]:
        errors = ", ".join(f"{number} {kind}" for kind, number in run["errors"].items())
        raise LadderError(f"the service answered nothing: {errors or 'no request ended'}")
    cpu_ms = run["service_cpu_ms"] or 0.0
    pss_mib, rss_mib = _memory(service)
    return Figures(
        images_per_s=run["images_per_s"],
        p50_ms=run["p50_ms"],
        cpu_ms_per_image=cpu_ms,
        utilisation=round(run["images_per_s"] * cpu_ms / 1e3 / job.cores, 4),
        utilisation_spread=round(pstdev(shares), 4) if shares else 0.0,
        pss_mib=pss_mib,
        rss_mib=rss_mib,
        num_images=run["num_ok"],
        seconds=run["duration_s"],
        watts=round(fmean(watts), 2) if watts else None,
    )


def _followed(
    bench: Child, service: psutil.Process, job: LadderJob
) -> tuple[list[float], list[float]]:
    """Sample the cores' shares and the CPUs' watts until ``bench`` ends.

    Return the samples of its last run, without those of its start and warm-up.
    """
    samples: list[tuple[float, float | None]] = []
    power, cpu_s, at_s = PackagePower(), _cpu_s(service), time.monotonic()
    deadline = at_s + job.asked.seconds * (1 + WARM_UP) + LOAD_LIMIT_S
    while not bench.has_ended(SAMPLE_S) and at_s < deadline:
        now_cpu_s, now_s = _cpu_s(service), time.monotonic()
        share = max(0.0, now_cpu_s - cpu_s) / (now_s - at_s) / job.cores
        samples.append((share, power.total_watts()))
        cpu_s, at_s = now_cpu_s, now_s
    of_run = samples[-max(1, int(job.asked.seconds / SAMPLE_S)) :]
    return [share for share, _ in of_run], [watts for _, watts in of_run if watts is not None]


def _run_in(result_file: Path) -> dict[str, Any] | None:
    """Return the figures of the run in bench's result; None if there is no result."""
    try:
        (run,) = json.loads(result_file.read_text("utf-8"))["runs"]
    except (OSError, ValueError, KeyError):
        return None
    return dict(run)


def _labelled(work: Path) -> list[tuple[Path, int]]:
    """Return the labelled files and their classes, as stored by the preparation."""
    try:
        noted = json.loads((work / LABELLED_FILES).read_text("utf-8"))
    except (OSError, ValueError):
        return []
    return [(Path(path), int(index)) for path, index in noted]


@contextmanager
def _photos(work: Path) -> Iterator[list[str]]:
    """Yield bench's options for the photos: the labelled ones, or generated ones."""
    files, folder = _labelled(work), work / "photos"
    if not files:
        yield []
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for number, (path, _) in enumerate(files):
        (folder / f"{number:06}{path.suffix}").symlink_to(path)
    try:
        yield ["--images", str(folder)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _top1(url: str, work: Path) -> dict[str, float | int]:
    """Send every labelled image to the service; return the fields of :class:`Figures`."""
    files = _labelled(work)
    if not files:
        return {}
    num_right = 0
    with httpx.Client(base_url=url, timeout=30, trust_env=False) as client:
        for path, index in files:
            answer = client.post("/v1/classify", params={"top_k": 1}, content=path.read_bytes())
            if answer.status_code != 200:
                raise LadderError(f"{path}: the service answers {answer.text[:300]}")
            num_right += answer.json()["predictions"][0]["index"] == index
    return {"top1": round(num_right / len(files), 4), "num_labelled": len(files)}


def _memory(root: psutil.Process) -> tuple[float, float]:
    """Return PSS and RSS of the service's processes, in MiB."""
    pss = rss = 0
    for process in (root, *root.children(recursive=True)):
        with suppress(psutil.Error):
            info = process.memory_full_info()
            pss, rss = pss + info.pss, rss + info.rss
    return round(pss / MIB, 1), round(rss / MIB, 1)


def _cpu_s(root: psutil.Process) -> float:
    """Return the CPU time so far of the service's processes, in s."""
    spent_s = 0.0
    for process in (root, *root.children(recursive=True)):
        with suppress(psutil.Error):
            times = process.cpu_times()
            spent_s += times.user + times.system
    return spent_s
