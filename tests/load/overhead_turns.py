"""The turns of tests/load/overhead.py: one load on one server, or on the networks in process."""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import psutil
import typer
from lean_load import run_lean
from machine import cpu_seconds, process_tree
from running import Running
from thread_cpu import by_thread, thread_seconds, watched

from app.bench.load import Load, Target
from app.bench.measurement import Run, summarise
from app.bench.measurement import cpu_seconds as cpu_by_stage
from calibration.offline import InProcessPipeline, OneImage, measure_upper_bound
from models.machine import available_cpus
from models.model_set import load_model_set

BOUND = "bound"
FORMS = "forms"
RAY = "Ray"  # what app.bench.measurement calls all that is neither replica nor HAProxy
FILES, FORM_CLIENTS = 16, 2
WARM_UP_S = 5.0
BOUND_IMAGES = 60
KEPT = 3  # setups whose difference is within the noise; the best of them counts
Row = dict[str, Any]
Processes = list[psutil.Process]


class Turns:
    """Loads every contestant in turns; without ``bound_set`` the bound is left out."""

    def __init__(self, services, bodies, bound_set, loads, seconds):
        self._services, self._bodies = services, bodies
        self._loads, self._seconds = loads, seconds
        self._bound = InProcess(bodies, bound_set, seconds) if bound_set else None

    def rounds(self, numbers: Iterable[int], group: str) -> list[Row]:
        """Return a row for each turn; in every round another contestant is first."""
        # What a service makes when it is first needed, as batches of a backlog, is there then.
        most = max([16, *(int(load) for load in self._loads if load != FORMS)])
        for service in self._services.values():
            target = Target(service.url, self._bodies, query=service.query)
            warm_up = Load(target, WARM_UP_S, clients=most)
            run_lean(warm_up, lambda: None)
        names = [*([BOUND] if self._bound else []), *self._services]
        rows = []
        for index in numbers:
            for load in self._loads:
                for place in range(len(names)):
                    name = names[(index + place) % len(names)]
                    row = {"round": index, "load": load, "contestant": name}
                    rows.append(row | self._turn(name, load))
                    typer.echo(f"{group}: {short(rows[-1])}", err=True)
        return rows

    def _turn(self, name: str, load: str) -> Row:
        if name == BOUND:
            return self._in_process(load)
        own = self._services[name]
        others = [one for one in self._running if one.process is not own.process]
        return served(own, others, self._load(own, load))

    @property
    def _running(self) -> list[Running]:
        """One of each process: two contestants may be one service that is asked differently."""
        return list({one.process.pid: one for one in self._services.values()}.values())

    def _in_process(self, load: str) -> Row:
        assert self._bound is not None
        at_rest = [p for one in self._running for p in process_tree(one.process.pid)]
        started, before = time.perf_counter(), cpu_seconds(at_rest)
        row = self._bound.measure(load)
        others_cores = (cpu_seconds(at_rest) - before) / (time.perf_counter() - started)
        return row | shared_cores(row["images_per_s"], others_cores, 0.0)

    def _load(self, own: Running, load: str) -> Load:
        if load == FORMS:
            target = Target(own.url, self._bodies, files_per_request=FILES, query=own.query)
            return Load(target, self._seconds, clients=FORM_CLIENTS)
        target = Target(own.url, self._bodies, query=own.query)
        return Load(target, self._seconds, clients=int(load))


class InProcess:
    """The bound: the best setups for many images, each time anew, and one image alone."""

    def __init__(self, bodies: list[bytes], name: str, seconds: float) -> None:
        self._bodies, self._seconds, model_set = bodies, seconds, load_model_set(name)
        rates = measure_upper_bound(model_set, bodies, rounds=3, seconds=1.5).setups
        setups = sorted(rates, key=lambda setup: -rates[setup])[:KEPT]
        self._many = [(InProcessPipeline(model_set, "INT8", one), rates[one]) for one in setups]
        self._one = OneImage(model_set, "INT8")

    def measure(self, load: str) -> Row:
        """Return images/s and CPU ms of an image; for one client its time alone as well."""
        if load != "1":
            images_per_s, cpu_ms = max(self._measured(*setup) for setup in self._many)
            return {"images_per_s": images_per_s, "cpu_ms": cpu_ms}
        before = time.process_time()
        p50_ms = self._one.measure(self._bodies, BOUND_IMAGES)
        # Two ways of sharing the cores were tried, each warmed up: the mean of both.
        cpu_ms = (time.process_time() - before) / (2 * (BOUND_IMAGES + 5)) * 1e3
        return {"images_per_s": round(1e3 / p50_ms, 2), "p50_ms": p50_ms, "cpu_ms": cpu_ms}

    def _measured(self, pipeline: InProcessPipeline, rate: float) -> tuple[float, float]:
        """Return a setup's images/s, and its CPU time of an image in ms."""
        batch_size, streams = pipeline.setup.batch_size, pipeline.setup.streams
        num_rounds = max(1, round(rate * self._seconds / KEPT / (streams * batch_size)))
        before, num_batches = time.process_time(), num_rounds * streams
        images_per_s = pipeline.run(self._bodies, num_batches)
        spent = time.process_time() - before
        return round(images_per_s, 2), round(spent / (num_batches * batch_size) * 1e3, 3)


class Snapshot:
    """CPU time so far of a service, by process and thread, and of those at rest."""

    def __init__(self, root: psutil.Process, pids: Mapping[int, str], at_rest: Processes) -> None:
        self.at, self.threads = time.perf_counter(), thread_seconds(pids)
        self.stages, self.at_rest_s = cpu_by_stage(root), cpu_seconds(at_rest)


def served(service: Running, others: Sequence[Running], load: Load) -> Row:
    """Load a service; return its figures, by process and thread too."""
    root = psutil.Process(service.process.pid)
    at_rest = [process for one in others for process in process_tree(one.process.pid)]
    pids = watched(root)
    run, before, after = run_lean(load, lambda: Snapshot(root, pids, at_rest))
    run.service_cpu_s = {
        stage: seconds - before.stages.get(stage, 0.0) for stage, seconds in after.stages.items()
    }
    if not any(stage != RAY for stage in run.service_cpu_s):
        run.service_cpu_s = {"server": run.service_cpu_s[RAY]}
    told = summarise(run, 100)
    num_images = max(1, told.num_ok * run.files_per_request)
    return {
        "images_per_s": told.images_per_s,
        **percentiles(run),
        "cpu_ms": told.service_cpu_ms,
        "by_process": told.service_cpu_ms_by_stage,
        "by_thread": by_thread(pids, before.threads, after.threads, num_images),
        "generator_cpu_ms": round(run.client_cpu_s / num_images * 1e3, 3),
        **shared_cores(
            told.images_per_s,
            (after.at_rest_s - before.at_rest_s) / (after.at - before.at),
            run.client_cpu_s / run.duration_s,
        ),
        "errors": told.errors,
    }


def shared_cores(images_per_s: float, others: float, generator: float) -> Row:
    """Return what others took meanwhile, and the images/s for each core that they left."""
    return {
        "generator_cores": round(generator, 3),
        "others_cores": round(others, 3),
        "images_per_s_of_a_core_left": round(
            images_per_s / (available_cpus() - generator - others), 3
        ),
    }


def percentiles(run: Run) -> dict[str, float]:
    latencies = [sample.latency_ms for sample in run.samples if sample.error is None]
    if not latencies:
        raise SystemExit(f"nothing was answered: {summarise(run, 100).errors}")
    found = np.percentile(latencies, (50, 95, 99))
    return {f"p{q}_ms": round(float(v), 2) for q, v in zip((50, 95, 99), found, strict=True)}


def short(row: Row) -> str:
    figures = {k: round(row[k], 2) for k in ("images_per_s", "p50_ms", "cpu_ms") if row.get(k)}
    return f"round {row['round']}, {row['load']}, {row['contestant']}: {figures}"
