"""``tandem bench``: loads a running service, or measures this machine's upper bound (--limit).

The runs of a service come one after another; their figures become a table and a plot.
"""

import ssl
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from app.access import key_headers
from app.bench.load import Load, Progress, Target, drawn_photos, photos_in, run_load
from app.bench.measurement import Summary, knee, service_root, summarise
from app.cli.main import Caller, JsonFile, PhotoFolder, Plot, check_can_plot, service_url
from app.errors import ConfigError
from models.files import check_can_write, write_json
from models.machine import describe_machine, needs_extra

MAX_NUMBER = 1e6
err = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False)
out = Console(soft_wrap=True, highlight=False, emoji=False)


@dataclass(frozen=True)
class BenchOptions:
    """The options of the command line."""

    url: Annotated[str, typer.Option(help="a running service")] = "http://127.0.0.1:8000"
    images: PhotoFolder = None
    concurrency: Annotated[
        str | None,
        typer.Option(help="closed loops with these numbers of clients  (default: 1,8,16)"),
    ] = None
    rate: Annotated[
        str | None, typer.Option(help="open loops with Poisson arrivals at these rates/s, as 10,20")
    ] = None
    files: Annotated[int, typer.Option(help="photos in each request, as a form", min=1)] = 1
    duration: Annotated[
        float, typer.Option(help="seconds of each run; with --limit 3 x a fifth of it", min=0.1)
    ] = 10.0
    warm_up: Annotated[float, typer.Option(help="seconds of load before, not counted", min=0)] = 3.0
    objective_ms: Annotated[float, typer.Option(help="latency that counts as goodput", min=0)] = 100
    seed: Annotated[int, typer.Option(help="seed of the arrival times")] = 20
    json_file: JsonFile = None
    plot: Plot = None
    limit: Annotated[
        bool, typer.Option("--limit", help="measure this machine's bound in one process, no server")
    ] = False
    model_set: Annotated[str, typer.Option(help="with --limit: the set")] = "imagenette"
    precision: Annotated[
        str | None,
        typer.Option(
            help="with --limit: INT8 or FP16  (default: TANDEM_PRECISION, or what the set has)"
        ),
    ] = None


def bench(asked: BenchOptions, caller: Caller) -> None:
    """Load a running service and report throughput, latency, errors and CPU time.

    In open loops latency counts from the scheduled time. The load comes from another process,
    whose own cost is printed. Exit code 1: no request was answered.
    """
    _check_numbers(duration=asked.duration, warm_up=asked.warm_up, objective_ms=asked.objective_ms)
    check_can_write(asked.json_file)
    check_can_plot(asked.plot, "bench")
    if asked.limit and asked.plot is not None:
        raise ConfigError("--plot draws a service's latency; --limit has none")
    bodies, facts = _bodies(asked.images)
    quiet = str(asked.json_file) == "-"
    if asked.limit:
        (entry,) = entry_points(group="tandem.offline", name="limit")  # calibration's
        result = entry.load()(bodies, asked.model_set, asked.precision, asked.duration, quiet=quiet)
    else:
        headers = key_headers(caller.key_file)
        target = Target(
            service_url(asked.url),
            bodies,
            files_per_request=asked.files,
            headers=headers,
            tls=caller.tls,
        )
        result = run_loads(
            _loads(Load(target, asked.duration, seed=asked.seed), asked.concurrency, asked.rate),
            warm_up_s=asked.warm_up,
            objective_ms=asked.objective_ms,
            plot_file=asked.plot,
            quiet=quiet,
        )
    write_json(asked.json_file, facts | result)
    if not asked.limit and not any(run["num_ok"] for run in result["runs"]):
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


def run_loads(
    planned: Sequence[Load],
    *,
    warm_up_s: float,
    objective_ms: float,
    plot_file: Path | None,
    quiet: bool,
) -> dict[str, Any]:
    """Run loads on one target, print them unless ``quiet``, and return the results for JSON.

    Raises :class:`ConfigError` if no service is ready at the target's address.
    """
    target = planned[0].target
    model_set, service = _served(target), service_root(target.url)
    summaries = []
    with err.status("warming up") as status:
        if warm_up_s:
            run_load(Load(target, warm_up_s, clients=8), None)
        for load in planned:
            what = f"{load.rate:g} requests/s" if load.rate else f"{load.clients} clients"

            def report(
                progress: Progress, what: str = what, duration_s: float = load.duration_s
            ) -> None:
                failed = f", {progress.num_failed} failed" if progress.num_failed else ""
                status.update(
                    f"{what}: {progress.elapsed_s:.0f} of {duration_s:g} s, "
                    f"{progress.num_done} answered{failed}"
                )

            summaries.append(summarise(run_load(load, service, report), objective_ms))
    if not quiet:
        show_runs(out, summaries, objective_ms)
    if plot_file is not None:
        plot(plot_file, summaries, objective_ms)
    return {
        "url": target.url,
        "files_per_request": target.files_per_request,
        "model_set": model_set,
        "objective_ms": objective_ms,
        "knee_requests_per_s": knee(summaries),
        "runs": [asdict(s) for s in summaries],
    }


def _served(target: Target) -> str:
    """Return the served set's name; raise :class:`ConfigError` if no service is ready there."""
    url = target.url
    try:
        # Without a proxy, as the load itself, but with SSL_CERT_FILE's roots (the context).
        verify = target.tls.context() or ssl.create_default_context()
        with httpx.Client(base_url=url, timeout=10, trust_env=False, verify=verify) as client:
            client.get("/readyz").raise_for_status()
            models = client.get("/v1/models", headers=dict(target.headers))
        if models.status_code == 401:
            raise ConfigError(f"{url}: {models.json()['error']['message']}; give --key-file")
        name = models.json()["model_set"]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"no Tandem is ready at {url} ({type(error).__name__}: {error}); start one with "
            "tandem serve, or give --url"
        ) from error
    return str(name)


def show_runs(console: Console, summaries: list[Summary], objective_ms: float) -> None:
    """Print a row per run, and notes on runs that need an explanation."""
    # Units stand on a second line, without lines between columns, to fit into 80 columns.
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    table.add_column("load", overflow="fold")
    times = ("p50\nms", "p90\nms", "p99\nms", "max\nms")
    rates = ("ok\n/s", "images\n/s", f"<{objective_ms:g} ms\n/s")
    for column in (*rates, *times, "errors", "CPU\nms"):
        table.add_column(column, no_wrap=True, justify="right")
    for s in summaries:
        table.add_row(
            _load(s),
            *(_figure(rate) for rate in (s.throughput, s.images_per_s, s.goodput)),
            *("-" if t is None else f"{t:.0f}" for t in (s.p50_ms, s.p90_ms, s.p99_ms, s.max_ms)),
            str(sum(s.errors.values())),
            "-" if s.service_cpu_ms is None else _figure(s.service_cpu_ms),
        )
    console.print(table)
    console.print(
        "p50 to max: latencies, open loops from the scheduled time;\n"
        "CPU: of the service's processes, an image"
    )
    for s in summaries:
        if s.errors:
            kinds = ", ".join(f"{number} {kind}" for kind, number in s.errors.items())
            console.print(f"errors at {_load(s)}: {kinds}", markup=False)
    worst = max(s.client_cpu_ms for s in summaries)
    console.print(f"the load generator itself took up to {worst:.2f} CPU ms a request")
    for s in summaries:
        if s.is_saturated:
            console.print(
                f"[yellow]{s.offered:g}/s is more than the service can do[/]: it answered "
                f"{s.throughput:.1f}/s; the rest failed, or waited longer and longer"
            )


def _figure(value: float) -> str:
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _load(summary: Summary) -> str:
    return f"{summary.offered:g}" + ("/s" if summary.kind == "open" else " clients")


def plot(path: Path, summaries: list[Summary], objective_ms: float) -> None:
    """Plot latency against the offered rate (open loops) or the clients (closed loops)."""
    with needs_extra("calibrate", "bench --plot"):
        import matplotlib as mpl
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator, NullFormatter
    style: dict[Any, Any] = {"axes.spines.top": False, "axes.spines.right": False}
    open_runs = [s for s in summaries if s.kind == "open"]
    runs = sorted(open_runs or summaries, key=lambda s: s.offered)
    with mpl.rc_context(style):
        figure = Figure(figsize=(7, 4.2))
        axes = figure.add_subplot()
        for name, color in (("p50_ms", "#1b6f5f"), ("p90_ms", "#4a6fa5"), ("p99_ms", "#c8703a")):
            points = [(s.offered, v) for s in runs if (v := getattr(s, name)) is not None]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", color=color, label=name[:3])
        of_line: dict[str, Any] = {"color": "#888888", "linewidth": 1}
        objective = f"objective: {objective_ms:g} ms"
        axes.axhline(objective_ms, linestyle="--", label=objective, **of_line)
        if (rate := knee(summaries)) is not None:
            axes.axvline(rate, linestyle=":", label=f"knee: {rate:g}/s", **of_line)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_xticks(loads := sorted({s.offered for s in runs}), [f"{x:g}" for x in loads])
        axes.set_xlabel("offered requests/s" if open_runs else "clients")
        axes.set_ylabel("latency, ms")
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=5, frameon=False)
        figure.savefig(path, bbox_inches="tight", dpi=150)
