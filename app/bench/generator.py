"""Runs the load generator in a child process, so that its CPU time is not the service's."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from app.bench.client import closed_loop, open_loop
from app.bench.load import Load, poisson_arrivals
from app.bench.process_tree import cpu_seconds
from app.bench.samples import Run, TimedRequest
from app.errors import ConfigError
from models.child_process import ChildDiedError, Send, run_apart

REPORT_EVERY_S = 0.25
LATE_S = 30.0  # after a run's time and its requests' time limit, before it is given up


@dataclass(frozen=True)
class Progress:
    """The progress of a run; the first one says that the child has started."""

    elapsed_s: float = 0.0
    num_done: int = 0
    num_failed: int = 0


ReportProgress = Callable[[Progress], None]


def run_load(
    load: Load, service: psutil.Process | None, report: ReportProgress = lambda _: None
) -> Run:
    """Run ``load`` in a new process and return its result.

    Raises:
        ConfigError: the generator died, or did not end in time.

    """
    before: dict[str, float] = {}

    def heard(progress: Progress) -> None:
        if service is not None and not before:  # the service was idle while the child started
            before.update(cpu_seconds(service))
        report(progress)

    limit_s = load.duration_s + load.target.timeout_s + LATE_S
    try:
        run: Run = run_apart(_generate, load, heard=heard, limit_s=limit_s)
    except ChildDiedError as error:
        raise ConfigError(f"the load generator died ({error}); is memory left?") from error
    except TimeoutError:
        raise ConfigError(
            f"the load generator gave no result within {load.duration_s:g} s and its requests' "
            "time; does the service close its connections, and is nothing else busy on this "
            "machine?"
        ) from None
    run.files_per_request = load.target.files_per_request
    if service is not None:
        after = cpu_seconds(service)
        run.service_cpu_s = {stage: after[stage] - before.get(stage, 0.0) for stage in after}
    return run


def _generate(load: Load, send: Send) -> Run:
    """Run the load in the child; send the progress now and then."""
    samples: list[TimedRequest] = []
    num_failed, report_at = 0, 0.0

    def heard(sample: TimedRequest) -> None:
        nonlocal num_failed, report_at
        samples.append(sample)
        num_failed += sample.error is not None
        if sample.finished >= report_at:
            report_at = sample.finished + REPORT_EVERY_S
            send(Progress(sample.finished, len(samples), num_failed))

    send(Progress())
    before = time.process_time()
    if load.rate:
        arrivals = poisson_arrivals(load.rate, load.duration_s, load.seed).tolist()
        asyncio.run(open_loop(load.target, arrivals, heard))
    else:
        asyncio.run(closed_loop(load.target, load.clients, load.duration_s, heard))
    spent = time.process_time() - before
    return Run(load.kind, load.offered, load.duration_s, samples, spent)
