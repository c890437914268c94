"""Overload: ``python tests/load/overload.py PHOTOS``.

What a service answers at three and ten times the rate it can carry, beside what it answers at the
most (16 clients in a closed loop, before and after every turn) and at 80 % of that (an open loop):

- goodput as a share of the most, raw and of the cores that the load generator left;
- how long the answers took, and their p99 as a multiple of that at 80 %, from ``SETTLED_S`` on:
  how much more comes than is answered shows only when the places are taken;
- the CPU time of a refusal: what was used beside the answers, which cost what they cost otherwise.

Prints JSON.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import psutil
import typer
from machine import describe, write_result
from running import running_service

from app.bench.load import Load, Target, photos_in, run_load
from app.bench.measurement import Run, Summary, summarise
from models.machine import available_cpus

CLIENTS = 16
DEADLINE_MS = 10_000.0  # request_timeout_s: the service answers within, or not at all
FACTORS = (3, 10)
REFUSED = "http_429"
USUAL = 0.8  # of the most
SETTLED_S = 3.0
GOODPUT = ("goodput_share", "of_what_the_generator_left")
OTHERS = (
    "p99_times_usual",
    "whole_p99_times_usual",
    "p50_ms",
    "p99_ms",
    "cpu_ms_a_refusal",
)


def main(
    photos: Annotated[Path, typer.Argument(help="folder of JPEGs", exists=True)],
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    seconds: Annotated[float, typer.Option(help="of each overload", min=1)] = 15.0,
    config: Annotated[Path | None, typer.Option(help="other than serve_config.yaml")] = None,
    out: Annotated[Path | None, typer.Option(help="write the JSON there")] = None,
) -> None:
    """Measure in turns: as much as it can carry, then more."""
    bodies = photos_in(photos)
    rows: list[dict[str, Any]] = []
    arguments = ["--config", str(config)] if config else []
    with running_service(*arguments) as service:
        turn(service, bodies, 5.0, clients=CLIENTS)
        before = turn(service, bodies, seconds / 2, clients=CLIENTS)
        for number in range(rounds):
            usual = turn(service, bodies, seconds, rate=USUAL * before["throughput"])
            rows.append({"times_capacity": USUAL, **usual})
            for factor in FACTORS:
                rate = factor * before["throughput"]
                over = turn(service, bodies, seconds, rate=rate)
                after = turn(service, bodies, seconds / 2, clients=CLIENTS)
                compared = shares(over, before, after) | beside_usual(over, usual)
                rows.append({"times_capacity": factor, **compared, **over})
                typer.echo(f"round {number + 1} of {rounds}: {rows[-1]}", err=True)
                before = after
    result = {
        "machine": describe(),
        "deadline_ms": DEADLINE_MS,
        "settled_s": SETTLED_S,
        "median_goodput_share": {f"{f}x": medians(rows, f, GOODPUT) for f in FACTORS},
        "medians": {f"{f:g}x": medians(rows, f, OTHERS) for f in (USUAL, *FACTORS)},
        "turns": rows,
    }
    write_result(result, out)


def shares(over: dict[str, Any], before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Compare a turn's goodput with what was carried before and after it."""
    cores = available_cpus()
    most = (before["throughput"] + after["throughput"]) / 2
    left = (2 * cores - before["client_cores"] - after["client_cores"]) / 2
    share = over["goodput"] / most
    an_image = (
        sum(before["cpu_ms_per_image"].values()) + sum(after["cpu_ms_per_image"].values())
    ) / 2
    beside_ms = over["cpu_ms"] - over["num_answered"] * an_image
    num_refused = over["errors"].get(REFUSED, 0)
    return {
        "carried_per_s": round(most, 2),
        "goodput_share": round(share, 4),
        "of_what_the_generator_left": round(share * left / (cores - over["client_cores"]), 4),
        "cpu_ms_a_refusal": round(beside_ms / num_refused, 3) if num_refused else None,
    }


def beside_usual(over: dict[str, Any], usual: dict[str, Any]) -> dict[str, float]:
    """Compare the latencies of a turn with those at ``USUAL``."""
    return {
        "p99_times_usual": round(over["p99_ms"] / usual["p99_ms"], 2),
        "whole_p99_times_usual": round(over["whole_p99_ms"] / usual["whole_p99_ms"], 2),
    }


def medians(rows: list[dict[str, Any]], factor: float, names: Sequence[str]) -> dict[str, float]:
    """Return the median figures of all turns at so many times the capacity."""
    chosen = [row for row in rows if row["times_capacity"] == factor]
    found = {name: [row[name] for row in chosen if row.get(name) is not None] for name in names}
    return {name: round(median(values), 3) for name, values in found.items() if values}


def turn(service, bodies, seconds, clients=0, rate=0.0):
    """Return the figures of one turn; ``p50_ms`` and ``p99_ms`` are of the settled part."""
    load = Load(Target(service.url, bodies), seconds, clients=clients, rate=rate)
    run = run_load(load, psutil.Process(service.process.pid))
    told, then = summarise(run, DEADLINE_MS), settled(run)
    return {
        "offered": round(told.offered, 1),
        "throughput": told.throughput,
        "goodput": told.goodput,
        "num_answered": told.num_ok,
        "p50_ms": then.p50_ms,
        "p99_ms": then.p99_ms,
        "whole_p99_ms": told.p99_ms,
        "refused_p50_ms": refused_p50_ms(run),
        "errors": told.errors,
        "client_cores": round(run.client_cpu_s / run.duration_s, 3),
        "cpu_ms": round(1e3 * sum((run.service_cpu_s or {}).values())),
        "cpu_ms_per_image": told.service_cpu_ms_by_stage,
    }


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
