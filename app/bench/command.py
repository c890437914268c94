"""``tandem bench``: load on a running service, or with --limit the bound of this machine."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import httpx
import typer
from rich.console import Console
from rich.markup import escape

from app.errors import ConfigError
from models.model_set import load_model_set, search_path
from models.record import Precision

if TYPE_CHECKING:
    from app.bench.client import Target

err = Console(stderr=True, soft_wrap=True, highlight=False)
out = Console(soft_wrap=True, highlight=False)


def bench(
    url: Annotated[str, typer.Option(help="a running service")] = "http://127.0.0.1:8000",
    images: Annotated[
        Path | None, typer.Option(help="folder of photos, sent in turn  (default: drawn ones)")
    ] = None,
    concurrency: Annotated[
        str | None, typer.Option(help="closed loops of so many clients  (default: 1,8,16)")
    ] = None,
    rate: Annotated[
        str | None, typer.Option(help="open loops, Poisson arrivals of so many requests/s: 10,20")
    ] = None,
    files: Annotated[int, typer.Option(help="photos a request, in a form", min=1)] = 1,
    duration: Annotated[
        float, typer.Option(help="s of each run; --limit: 3 x a fifth a setup", min=0.1)
    ] = 10.0,
    warm_up: Annotated[float, typer.Option(help="s of 8 clients before, not counted", min=0)] = 3.0,
    objective_ms: Annotated[float, typer.Option(help="goodput: answered within this", min=0)] = 100,
    seed: Annotated[int, typer.Option(help="of the arrival times")] = 20,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="write the result as JSON; - is stdout")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="latency against load, as .png or .svg")] = None,
    limit: Annotated[
        bool, typer.Option("--limit", help="no server: what this machine can do in one process")
    ] = False,
    model_set: Annotated[str, typer.Option(help="of --limit")] = "imagenette",
    precision: Annotated[str, typer.Option(help="of --limit: INT8 or FP16")] = "INT8",
) -> None:
    """Load a running service and tell throughput, latency, errors and CPU; or measure the bound.

    Latency in an open loop counts from the scheduled time. The load comes from another process,
    whose own cost is told. Exit code 1: nothing was answered.
    """
    from app.bench.client import Target
    from app.bench.machine import describe
    from app.bench.photos import drawn_photos, photos_in

    for path in (json_file, plot):
        _check_can_write(path)
    bodies = photos_in(images) if images else drawn_photos()
    told = str(images) if images else "drawn photos of 500 x 375"
    facts = {"machine": describe(), "images": told, "num_images": len(bodies)}
    if limit:
        result = _limit(bodies, model_set, precision, duration, quiet=str(json_file) == "-")
    else:
        clients = numbers(concurrency, "--concurrency", whole=True) if concurrency else []
        rates = numbers(rate, "--rate") if rate else []
        loads = (clients, rates) if clients or rates else ([1.0, 8.0, 16.0], [])
        target = Target(url.rstrip("/"), bodies, files_per_request=files)
        options = _Options(target, duration, warm_up, objective_ms, seed, plot)
        result = _runs(loads, options, quiet=str(json_file) == "-")
    _write(json_file, facts | result)
    if not limit and not any(run["num_ok"] for run in result["runs"]):
        err.print("[red]no request was answered[/]")
        raise typer.Exit(1)


@dataclass(frozen=True)
class _Options:
    """What all runs share."""

    target: "Target"
    duration_s: float
    warm_up_s: float
    objective_ms: float
    seed: int
    plot: Path | None


def _limit(
    bodies: list[bytes], model_set: str, precision: str, duration_s: float, *, quiet: bool
) -> dict:  # type: ignore[type-arg]
    from app.bench.limit import measure_limit
    from app.bench.report import show_limit

    if precision not in ("INT8", "FP16"):
        raise ConfigError(f"--precision {precision!r}: INT8 or FP16")
    chosen: Precision = "INT8" if precision == "INT8" else "FP16"
    loaded = load_model_set(model_set, search_path())
    with err.status("measuring") as status:
        found = measure_limit(
            loaded,
            bodies,
            chosen,
            seconds=duration_s / 5,
            report=lambda text: status.update(escape(text)),
        )
    if not quiet:
        show_limit(out, found)
    return {"model_set": loaded.name, "limit": found.as_json()}


def _runs(loads: tuple[list[float], list[float]], options: _Options, *, quiet: bool) -> dict:  # type: ignore[type-arg]
    from app.bench.generator import Load, Progress, run_load
    from app.bench.report import knee, plot, show_runs
    from app.bench.samples import summarise
    from app.bench.tree import service_root

    target = options.target
    model_set, service = _served(target.url), service_root(target.url)
    planned = [Load(target, options.duration_s, clients=int(n)) for n in loads[0]]
    planned += [Load(target, options.duration_s, rate=rate, seed=options.seed) for rate in loads[1]]
    summaries = []
    with err.status("warming up") as status:
        if options.warm_up_s:
            run_load(Load(target, options.warm_up_s, clients=8), None)
        for load in planned:
            what = f"{load.rate:g} requests/s" if load.rate else f"{load.clients} clients"

            def report(progress: Progress, what: str = what) -> None:
                failed = f", {progress.num_failed} failed" if progress.num_failed else ""
                status.update(
                    f"{what}: {progress.elapsed_s:.0f} of {options.duration_s:g} s, "
                    f"{progress.num_done} answered{failed}"
                )

            summaries.append(summarise(run_load(load, service, report), options.objective_ms))
    if not quiet:
        show_runs(out, summaries, options.objective_ms)
    if options.plot is not None:
        plot(options.plot, summaries, options.objective_ms)
    return {
        "url": target.url,
        "files_per_request": target.files_per_request,
        "model_set": model_set,
        "objective_ms": options.objective_ms,
        "knee_requests_per_s": knee(summaries, options.objective_ms),
        "runs": [s.as_json() for s in summaries],
    }


def _served(url: str) -> str:
    """Return the served set's name; raise if nobody is there or it is not ready."""
    try:
        ready = httpx.get(f"{url}/readyz", timeout=10, trust_env=False)
        ready.raise_for_status()
        name = httpx.get(f"{url}/v1/models", timeout=10, trust_env=False).json()["model_set"]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"no Tandem is ready at {url} ({type(error).__name__}: {error}); start one with "
            "tandem serve, or give --url"
        ) from error
    return str(name)


def numbers(text: str, option: str, *, whole: bool = False) -> list[float]:
    """Read ``1,8,32``; every number must be above 0 and finite, ``whole`` without a fraction."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"{option} {text!r}: numbers with commas between, such as 1,8,32"
        ) from None
    if not all(0 < n < 1e6 and (not whole or n == int(n)) for n in found):
        kind = "whole numbers" if whole else "numbers"
        raise ConfigError(f"{option} {text!r}: {kind} above 0 and below a million")
    return found


def _check_can_write(path: Path | None) -> None:
    if path is None or str(path) == "-":
        return
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(f"cannot write {path}: give a file in a folder that exists")


def _write(path: Path | None, content: dict) -> None:  # type: ignore[type-arg]
    text = json.dumps(content, indent=2)
    if str(path) == "-":
        typer.echo(text)
    elif path is not None:
        path.write_text(text + "\n", "utf-8")
