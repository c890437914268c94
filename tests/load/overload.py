"""Goodput under overload: ``python tests/load/overload.py PHOTOS``.

What a service answers in time at three and ten times the rate it can carry, as a share of what it
answers at the most: 16 clients in a closed loop, before and after every turn. The load generator
shares the cores, and ten times the requests cost it more of them: so the share is told as it is,
and of what the generator left. Prints JSON.
"""

import json
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import psutil
import typer
from machine import describe
from running import Running, running_service

from app.bench.client import Target
from app.bench.generator import Load, run_load
from app.bench.photos import photos_in
from app.bench.samples import Run, summarise
from models.cpus import available_cpus

CLIENTS = 16
DEADLINE_MS = 10_000.0  # request_timeout_s: the service answers within, or not at all
FACTORS = (3, 10)


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
            for factor in FACTORS:
                rate = factor * before["throughput"]
                over = turn(service, bodies, seconds, rate=rate)
                after = turn(service, bodies, seconds / 2, clients=CLIENTS)
                rows.append({"times_capacity": factor, **shares(over, before, after), **over})
                typer.echo(f"round {number + 1} of {rounds}: {rows[-1]}", err=True)
                before = after
    result = {
        "machine": describe(),
        "deadline_ms": DEADLINE_MS,
        "median_goodput_share": {f"{factor}x": medians(rows, factor) for factor in FACTORS},
        "turns": rows,
    }
    text = json.dumps(result, indent=2)
    typer.echo(text)
    if out is not None:
        out.write_text(text + "\n", "utf-8")


def shares(over: dict[str, Any], before: dict[str, Any], after: dict[str, Any]) -> dict[str, float]:
    """Compare a turn's goodput with what was carried before and after it."""
    cores = available_cpus()
    most = (before["throughput"] + after["throughput"]) / 2
    left = (2 * cores - before["client_cores"] - after["client_cores"]) / 2
    share = over["goodput"] / most
    return {
        "carried_per_s": round(most, 2),
        "goodput_share": round(share, 4),
        "of_what_the_generator_left": round(share * left / (cores - over["client_cores"]), 4),
    }


def medians(rows: list[dict[str, Any]], factor: int) -> dict[str, float]:
    """Return the median shares of all turns at so many times the capacity."""
    chosen = [row for row in rows if row["times_capacity"] == factor]
    names = ("goodput_share", "of_what_the_generator_left")
    return {name: round(median(row[name] for row in chosen), 3) for name in names}


def turn(
    service: Running, bodies: list[bytes], seconds: float, clients: int = 0, rate: float = 0.0
) -> dict[str, Any]:
    """Return the figures of one turn."""
    load = Load(Target(service.url, bodies), seconds, clients=clients, rate=rate)
    run = run_load(load, psutil.Process(service.process.pid))
    told = summarise(run, DEADLINE_MS)
    return {
        "offered": round(told.offered, 1),
        "throughput": told.throughput,
        "goodput": told.goodput,
        "p50_ms": told.p50_ms,
        "p99_ms": told.p99_ms,
        "refused_p50_ms": refused_p50_ms(run),
        "errors": told.errors,
        "client_cores": round(run.client_cpu_s / run.duration_s, 3),
        "cpu_ms_per_image": told.service_cpu_ms_by_stage,
    }


def refused_p50_ms(run: Run) -> float | None:
    """Return how long a refusal takes."""
    refused = [sample.latency_ms for sample in run.samples if sample.error == "http_429"]
    return round(median(refused), 1) if refused else None


if __name__ == "__main__":
    typer.run(main)
