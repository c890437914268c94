"""``tandem bench``: loads a running service, or measures this machine's upper bound (--limit)."""

from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from app.access import key_headers
from app.bench.load import Load, Target, drawn_photos, photos_in
from app.bench.runs import run_loads
from app.cli.options import Caller, JsonFile, PhotoFolder, Plot, check_can_plot, service_url
from app.errors import ConfigError
from models.files import check_can_write, write_json
from models.machine import describe_machine

MAX_NUMBER = 1e6
err = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False)


def bench(
    url: Annotated[str, typer.Option(help="a running service")] = "http://127.0.0.1:8000",
    images: PhotoFolder = None,
    concurrency: Annotated[
        str | None,
        typer.Option(help="closed loops with these numbers of clients  (default: 1,8,16)"),
    ] = None,
    rate: Annotated[
        str | None, typer.Option(help="open loops with Poisson arrivals at these rates/s, as 10,20")
    ] = None,
    files: Annotated[int, typer.Option(help="photos in each request, as a form", min=1)] = 1,
    duration: Annotated[
        float, typer.Option(help="seconds of each run; with --limit 3 x a fifth of it", min=0.1)
    ] = 10.0,
    warm_up: Annotated[
        float, typer.Option(help="seconds of load before, not counted", min=0)
    ] = 3.0,
    objective_ms: Annotated[
        float, typer.Option(help="latency that counts as goodput", min=0)
    ] = 100,
    seed: Annotated[int, typer.Option(help="seed of the arrival times")] = 20,
    json_file: JsonFile = None,
    plot: Plot = None,
    limit: Annotated[
        bool, typer.Option("--limit", help="measure this machine's bound in one process, no server")
    ] = False,
    model_set: Annotated[str, typer.Option(help="with --limit: the set")] = "imagenette",
    precision: Annotated[
        str | None,
        typer.Option(
            help="with --limit: INT8 or FP16  (default: TANDEM_PRECISION, or what the set has)"
        ),
    ] = None,
    *,
    caller: Caller,
) -> None:
    """Load a running service and report throughput, latency, errors and CPU time.

    In open loops latency counts from the scheduled time. The load comes from another process,
    whose own cost is printed. Exit code 1: no request was answered.
    """
    _check_numbers(duration=duration, warm_up=warm_up, objective_ms=objective_ms)
    check_can_write(json_file)
    check_can_plot(plot, "bench")
    if limit and plot is not None:
        raise ConfigError("--plot draws a service's latency; --limit has none")
    bodies, facts = _bodies(images)
    quiet = str(json_file) == "-"
    if limit:
        (entry,) = entry_points(group="tandem.offline", name="limit")  # calibration's
        result = entry.load()(bodies, model_set, precision, duration, quiet=quiet)
    else:
        headers = key_headers(caller.key_file)
        target = Target(
            service_url(url), bodies, files_per_request=files, headers=headers, tls=caller.tls
        )
        result = run_loads(
            _loads(Load(target, duration, seed=seed), concurrency, rate),
            warm_up_s=warm_up,
            objective_ms=objective_ms,
            plot_file=plot,
            quiet=quiet,
        )
    write_json(json_file, facts | result)
    if not limit and not any(run["num_ok"] for run in result["runs"]):
        err.print("[red]no request was answered[/]")
        raise typer.Exit(1)


def _check_numbers(**values: float) -> None:
    for name, value in values.items():
        if not value < MAX_NUMBER:  # NaN too
            raise ConfigError(
                f"--{name.replace('_', '-')} is {value}: give a number below a million"
            )


def _bodies(images: Path | None) -> tuple[list[bytes], dict[str, object]]:
    """Return the photos to send, and the facts of them and of this machine for the result."""
    bodies = photos_in(images) if images else drawn_photos()
    origin = str(images) if images else "drawn photos of 500 x 375"
    return bodies, {"machine": describe_machine(), "images": origin, "num_images": len(bodies)}


def _loads(like: Load, concurrency: str | None, rate: str | None) -> list[Load]:
    if not (concurrency or rate):
        concurrency = "1,8,16"
    clients = numbers(concurrency, "--concurrency", whole=True) if concurrency else []
    rates = numbers(rate, "--rate") if rate else []
    closed = [replace(like, clients=int(number)) for number in clients]
    return closed + [replace(like, rate=number) for number in rates]


def numbers(text: str, option: str, *, whole: bool = False) -> list[float]:
    """Parse ``1,8,32``; every number must be above 0 and finite, and an integer if ``whole``."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option} {text!r} is not a list of numbers like 1,8,32") from None
    if not all(0 < n < MAX_NUMBER and (not whole or n == int(n)) for n in values):
        kind = "whole numbers" if whole else "numbers"
        raise ConfigError(f"{option} {text!r}: give {kind} above 0 and below a million")
    return values
