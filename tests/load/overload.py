"""Overload: ``python tests/load/overload.py PHOTOS --when-full refuse,fast --times 1.8,3,10``.

What a service answers at more than the rate it can carry, beside what it answers at the most (16
clients in a closed loop, before and after every turn, by the plan full) and at 80 % of that (an
open loop):

- goodput as a share of the most, raw and of the cores that the load generator left;
- how long the answers took, and their p99 as a multiple of that at 80 %, from ``SETTLED_S`` on:
  how much more comes than is answered shows only when the places are taken;
- the share of requests that is answered, the share of answers by the fast plan and, if PHOTOS has a
  folder for each class, the share of answers whose first class is right;
- the CPU time of a refusal: what was used beside the answers, which cost what they cost otherwise;
- how much of the answers' time was in the service, by their own timings, and in its queues;
- ``recovered_s``: a single photo is sent every ``PROBE_EVERY_S`` from the overload's end on. How
  long after the end was the first sent from which on each got 200 within the p99 at 80 %?
- ``memory_mib``, of all the service's processes: before the overload, at its end, and later. It is
  private memory (USS): what other processes share is not counted again.

With ``--apart`` the service has the first half of the cores and the load generator the other.
With several ``--when-full`` services run side by side and take turns. Prints JSON.
"""

import json
import os
import random
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import httpx
import psutil
import typer
from machine import describe, write_result
from running import TANDEM, Running, running

from app.bench.load import Load, Target, photos_in, run_load
from app.bench.measurement import Run, Summary, TimedRequest, summarise
from calibration.datasets import read_dataset
from models.errors import ModelSetError
from models.machine import available_cpus
from models.model_set import load_model_set

CLIENTS = 16
DEADLINE_MS = 10_000.0  # request_timeout_s: the service answers within, or not at all
REFUSED = "http_429"
USUAL = 0.8  # of the most
SETTLED_S = 3.0
PROBE_EVERY_S, NUM_PROBES = 0.02, 100
CALM_S = 4.0  # after an overload, until the service answers by the plan full again
GOODPUT = ("goodput_share", "of_what_the_generator_left")
OTHERS = (
    "p99_times_usual",
    "whole_p99_times_usual",
    "p50_ms",
    "p99_ms",
    "in_service_p50_ms",
    "queued_p50_ms",
    "cpu_ms_a_refusal",
    "answered_share",
    "fast_share",
    "top1",
    "recovered_s",
    "grew_mib",
)


@dataclass(frozen=True)
class Photos:
    """What is sent, and the index of each photo's class; without labels, None."""

    bodies: list[bytes]
    classes: list[int] | None


def main(
    photos: Annotated[Path, typer.Argument(help="JPEGs, or a folder for each class", exists=True)],
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    seconds: Annotated[float, typer.Option(help="of each overload", min=1)] = 15.0,
    times: Annotated[str, typer.Option(help="the rate of full")] = "3,10",
    when_full: Annotated[str, typer.Option(help="the setting: refuse, fast, or both")] = "refuse",
    model_set: Annotated[str, typer.Option("--set", help="name or folder")] = "imagenette",
    apart: Annotated[bool, typer.Option(help="service and load on cores of their own")] = False,
    config: Annotated[Path | None, typer.Option(help="other than serve_config.yaml")] = None,
    out: Annotated[Path | None, typer.Option(help="write the JSON there")] = None,
) -> None:
    """Measure in turns: as much as it can carry, then more."""
    sent, policies = read_photos(photos, model_set), when_full.split(",")
    factors = [float(factor) for factor in times.split(",")]
    command = [TANDEM, "serve", "--model-set", model_set]
    command += ["--config", str(config.absolute())] if config else []
    if apart:
        cores = sorted(os.sched_getaffinity(0))
        half = len(cores) // 2
        command = ["taskset", "-c", ",".join(map(str, cores[:half])), *command]
        os.sched_setaffinity(0, cores[half:])
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        services = {
            policy: stack.enter_context(running(command, {"TANDEM_WHEN_FULL": policy}))
            for policy in policies
        }
        for service in services.values():
            turn(service, sent, 5.0, clients=CLIENTS)
        for number in range(rounds):
            for policy in policies[number % len(policies) :] + policies[: number % len(policies)]:
                measured = one_round(services[policy], sent, seconds, factors, apart=apart)
                rows += [{"when_full": policy, **row} for row in measured]
                typer.echo(f"round {number + 1} of {rounds}, {policy}: {measured}", err=True)
    result = {
        "machine": describe(),
        "deadline_ms": DEADLINE_MS,
        "settled_s": SETTLED_S,
        "apart": apart,
        "median_goodput_share": {
            label(factor, policy): medians(rows, factor, policy, GOODPUT)
            for policy in policies
            for factor in factors
        },
        "medians": {
            label(factor, policy): medians(rows, factor, policy, OTHERS)
            for policy in policies
            for factor in (USUAL, *factors)
        },
        "turns": rows,
    }
    write_result(result, out)


def label(factor: float, policy: str) -> str:
    return f"{factor:g}x" if policy == "refuse" else f"{factor:g}x {policy}"


def read_photos(folder: Path, model_set: str) -> Photos:
    """Read the photos, in an order that mixes the classes."""
    try:
        images = list(read_dataset(folder, load_model_set(model_set)).images)
    except ModelSetError as error:
        typer.echo(f"no accuracy is measured: {error}", err=True)
        return Photos(photos_in(folder), None)
    random.Random(20).shuffle(images)
    return Photos([one.path.read_bytes() for one in images], [one.class_index for one in images])


def one_round(
    service: Running, photos: Photos, seconds: float, factors: Sequence[float], *, apart: bool
) -> list[dict[str, Any]]:
    """Return the rows of a service: what it carries usually, then more."""
    before = turn(service, photos, seconds / 2, clients=CLIENTS)
    usual = turn(service, photos, seconds, rate=USUAL * before["throughput"])
    rows = [{"times_capacity": USUAL, **usual}]
    for factor in factors:
        over = overload(service, photos, seconds, factor * before["throughput"], usual["p99_ms"])
        after = turn(service, photos, seconds / 2, clients=CLIENTS)
        compared = shares(over, before, after, apart=apart) | beside_usual(over, usual)
        rows.append({"times_capacity": factor, **compared, **over})
        before = after
    return rows


def overload(
    service: Running, photos: Photos, seconds: float, rate: float, well_ms: float
) -> dict[str, Any]:
    """Return the figures of an overload, with the recovery and the memory after it."""
    memory = [memory_mib(service)]
    with ThreadPoolExecutor(NUM_PROBES) as pool, httpx.Client(timeout=30.0) as client:
        client.get(f"{service.url}/healthz")
        probes: list[Future[tuple[int, float]]] = []

        def ask() -> tuple[int, float]:
            sent = time.perf_counter()
            answer = client.post(f"{service.url}/v1/classify", content=photos.bodies[0])
            return answer.status_code, (time.perf_counter() - sent) * 1e3

        def probe(ends_at: float) -> None:
            for number in range(NUM_PROBES):
                time.sleep(max(0.0, ends_at + number * PROBE_EVERY_S - time.perf_counter()))
                probes.append(pool.submit(ask))

        begun: list[Future[None]] = []

        def report(_: object) -> None:
            if not begun:
                begun.append(pool.submit(probe, time.perf_counter() + seconds))

        over = turn(service, photos, seconds, rate=rate, report=report)
        memory.append(memory_mib(service))
        begun[0].result()
        asked = [future.result() for future in probes]
    time.sleep(CALM_S)
    memory.append(memory_mib(service))
    ill = [n for n, (status, took_ms) in enumerate(asked) if status != 200 or took_ms > well_ms]
    return {
        **over,
        "recovered_s": round((max(ill) + 1) * PROBE_EVERY_S, 2) if ill else 0.0,
        "memory_mib": dict(zip(("before", "at_the_end", "later"), memory, strict=True)),
        "grew_mib": memory[-1] - memory[0],
    }


def memory_mib(service: Running) -> int:
    """Return the private memory of all processes of a service."""
    first, total = psutil.Process(service.process.pid), 0
    for process in (first, *first.children(recursive=True)):
        with suppress(psutil.Error):
            total += process.memory_full_info().uss
    return round(total / 2**20)


def shares(
    over: dict[str, Any], before: dict[str, Any], after: dict[str, Any], *, apart: bool
) -> dict[str, Any]:
    """Compare a turn's goodput with what was carried before and after it."""
    cores = available_cpus()
    most = (before["throughput"] + after["throughput"]) / 2
    left = (2 * cores - before["client_cores"] - after["client_cores"]) / 2
    share = over["goodput"] / most
    of_left = share if apart else share * left / (cores - over["client_cores"])
    an_image = (
        sum(before["cpu_ms_per_image"].values()) + sum(after["cpu_ms_per_image"].values())
    ) / 2
    beside_ms = over["cpu_ms"] - over["num_answered"] * an_image
    # Answers of the fast plan cost less than those before and after.
    num_refused = over["errors"].get(REFUSED, 0) if not over["fast_share"] else 0
    return {
        "carried_per_s": round(most, 2),
        "goodput_share": round(share, 4),
        "of_what_the_generator_left": round(of_left, 4),
        "cpu_ms_a_refusal": round(beside_ms / num_refused, 3) if num_refused else None,
    }


def beside_usual(over: dict[str, Any], usual: dict[str, Any]) -> dict[str, float | None]:
    """Compare the latencies of a turn with those at ``USUAL``; None if nothing was answered."""

    def times(name: str) -> float | None:
        return round(over[name] / usual[name], 2) if over[name] and usual[name] else None

    return {"p99_times_usual": times("p99_ms"), "whole_p99_times_usual": times("whole_p99_ms")}


def medians(
    rows: list[dict[str, Any]], factor: float, policy: str, names: Sequence[str]
) -> dict[str, float]:
    """Return the median figures of all turns at so many times the capacity."""
    chosen = [row for row in rows if (row["times_capacity"], row["when_full"]) == (factor, policy)]
    found = {name: [row[name] for row in chosen if row.get(name) is not None] for name in names}
    return {name: round(median(values), 4) for name, values in found.items() if values}


def turn(service, photos, seconds, clients=0, rate=0.0, report=lambda _: None):
    """Return the figures of one turn; ``p50_ms`` and ``p99_ms`` are of the settled part."""
    target = Target(service.url, photos.bodies, keeps_answers=True)
    load = Load(target, seconds, clients=clients, rate=rate)
    run = run_load(load, psutil.Process(service.process.pid), report)
    told, then = summarise(run, DEADLINE_MS), settled(run)
    return {
        "offered": round(told.offered, 1),
        "throughput": told.throughput,
        "goodput": told.goodput,
        "num_answered": told.num_ok,
        "answered_share": round(told.num_ok / max(1, told.num_requests), 4),
        **of_answers(run.samples, photos.classes),
        **of_timings(run),
        "p50_ms": then.p50_ms,
        "p99_ms": then.p99_ms,
        "whole_p99_ms": told.p99_ms,
        "refused_p50_ms": refused_p50_ms(run),
        "errors": told.errors,
        "client_cores": round(run.client_cpu_s / run.duration_s, 3),
        "cpu_ms": round(1e3 * sum((run.service_cpu_s or {}).values())),
        "cpu_ms_per_image": told.service_cpu_ms_by_stage,
    }


def of_answers(samples: Sequence[TimedRequest], classes: list[int] | None) -> dict[str, float]:
    """Return the share of answers by the fast plan, and of those that are right, if it is known."""
    kept = [(sample.answer[0], json.loads(sample.answer[1])) for sample in samples if sample.answer]
    num = max(1, len(kept))
    told = {"fast_share": round(sum(answer["plan"] == "fast" for _, answer in kept) / num, 4)}
    if classes is not None:
        firsts = [(number % len(classes), body["predictions"][0]["index"]) for number, body in kept]
        told["top1"] = round(sum(classes[place] == index for place, index in firsts) / num, 4)
    return told


def of_timings(run: Run) -> dict[str, float]:
    """Return the median time of settled answers in the service, and in its members' queues."""
    since = min(SETTLED_S, run.duration_s / 2)
    told = [
        json.loads(sample.answer[1])["timings_ms"]
        for sample in run.samples
        if sample.answer and sample.scheduled >= since
    ]
    if not told:
        return {}
    queued = [
        max((s["duration_ms"] for s in each["stages"] if s["stage"] == "queue"), default=0.0)
        for each in told
    ]
    whole = median(each["total"] for each in told)
    return {"in_service_p50_ms": round(whole, 1), "queued_p50_ms": round(median(queued), 1)}


def settled(run: Run) -> Summary:
    """Return the figures without the first ``SETTLED_S``, or half of a run that is short."""
    since = min(SETTLED_S, run.duration_s / 2)
    samples = [sample for sample in run.samples if sample.scheduled >= since]
    part = replace(run, samples=samples, began_s=since, duration_s=run.duration_s - since)
    return summarise(part, DEADLINE_MS)


def refused_p50_ms(run: Run) -> float | None:
    refused = [sample.latency_ms for sample in run.samples if sample.error == REFUSED]
    return round(median(refused), 1) if refused else None


if __name__ == "__main__":
    typer.run(main)
