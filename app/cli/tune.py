"""``tandem tune``: measures this machine, shows the trade-offs, and writes a configuration."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from app.cli.options import JsonFile, PhotoFolder, Plot, check_can_plot
from app.errors import ConfigError
from app.launch.config import ServeConfig
from app.tune.config import as_yaml, tuned
from models.result_files import check_can_write, write_json, write_result

if TYPE_CHECKING:  # imported at their use, so that tandem --help stays fast
    from app.tune.job import Job
    from app.tune.pareto import Point

err = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False)
out = Console(soft_wrap=True, highlight=False, emoji=False)


def tune(
    p99_ms: Annotated[
        float | None, typer.Option(help="p99 to keep, in ms; without it, the highest throughput")
    ] = None,
    images: PhotoFolder = None,
    model_set: Annotated[
        str | None,
        typer.Option(help="name of a set, or its folder  (default: the configuration's)"),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="file to tune  (default: serve_config.yaml)")
    ] = None,
    write: Annotated[
        Path | None, typer.Option(help="file for the whole tuned configuration")
    ] = None,
    json_file: JsonFile = None,
    plot: Plot = None,
    seconds: Annotated[float, typer.Option(help="seconds of each of some 100 runs")] = 2.0,
    force: Annotated[bool, typer.Option("--force", help="overwrite the file of --write")] = False,
) -> None:
    """Find the replicas, streams, threads and batch sizes that suit this machine.

    It takes minutes: every way to share the cores gets a short run, and the best
    are measured from one client to overload. It prints the best trade-offs of
    throughput and p99, and the fastest that keeps --p99-ms.

    The figures exclude HTTP and Ray, which add a few ms and percent; tandem bench
    measures a whole running service. Let nothing else run meanwhile. Exit code 1:
    nothing keeps --p99-ms, and no configuration is written.
    """
    from app.tune.job import prepare
    from app.tune.pareto import recommended
    from app.tune.report import as_json, show
    from app.tune.report import plot as draw
    from models.extras import describe_machine

    _check_numbers(p99_ms, seconds)
    _check_files(write, json_file, plot, force=force)
    job = prepare(config, model_set, images)
    machine, is_quiet = describe_machine(), str(json_file) == "-"
    points, took_s = _search(job, seconds)
    chosen = recommended(points, p99_ms)
    if not is_quiet:
        show(out, points, chosen)
        out.print(f"{len(points)} points on {escape(job.origin)} in {took_s / 60:.1f} min")
    if plot is not None:
        draw(plot, points, chosen, p99_ms)
    if write is not None and chosen is not None:
        text = as_yaml(tuned(job.config, chosen, points, p99_ms), chosen, machine, p99_ms)
        _check_is_new(write, force=force)  # another run may have written it meanwhile
        write_result(write, text, ServeConfig.read)
        err.print(f"wrote {escape(str(write))}; tandem serve --config {escape(str(write))}")
    asked = {"p99_ms": p99_ms, "seconds": seconds, "images": job.origin, "took_s": round(took_s, 1)}
    facts = {"machine": machine, "model_set": job.config.settings.model_set, **asked}
    write_json(json_file, facts | as_json(points, chosen))
    if chosen is None and p99_ms is not None:
        _refuse(points, p99_ms)


def _refuse(points: "list[Point]", p99_ms: float) -> None:
    """Print the lowest p99 that was measured, and exit with code 1."""
    lowest = min(points, key=lambda p: p.p99_ms)
    err.print(
        f"[red]nothing keeps a p99 of {p99_ms:g} ms[/]: the lowest was {lowest.p99_ms:.1f} ms, "
        f"{lowest.candidate}, {lowest.clients} clients; raise --p99-ms, or serve a smaller set"
    )
    raise typer.Exit(1)


def _check_numbers(p99_ms: float | None, seconds: float) -> None:
    for option, value, unit in (("--p99-ms", p99_ms, "ms"), ("--seconds", seconds, "s")):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{option} is {value}; it must be a number of {unit} above 0")


def _check_files(
    write: Path | None, json_file: Path | None, plot: Path | None, *, force: bool
) -> None:
    """Check that the results can be written, before minutes of measuring."""
    _check_is_new(write, force=force)
    check_can_write(write)
    check_can_write(json_file)
    check_can_plot(plot, "tune")
    if str(write) == "-":
        raise ConfigError("--write - is no file; name one, such as tuned.yaml")


def _check_is_new(write: Path | None, *, force: bool) -> None:
    if write is not None and not force and write.exists():
        raise ConfigError(f"{write} exists; --force overwrites it, or name another file")


def _search(job: "Job", seconds: float) -> tuple[list["Point"], float]:
    """Measure, with live progress; return the points, and the time it took in seconds."""
    from app.tune.candidates import candidates
    from app.tune.search import Search
    from app.tune.trials import Trials
    from models.cpus import available_cpus

    cores, started = available_cpus(), time.monotonic()
    with err.status("starting") as status:
        say: Callable[[str], None] = lambda text: status.update(Text(text))  # noqa: E731
        with Trials(job.settings, job.bodies, say) as trials:
            search = Search(candidates(cores), cores, trials.measure, seconds, say)
            points = search.run()
    for layout in search.left_out:
        err.print(f"[yellow]not measured {trials.why_left_out(layout)}[/]: {layout}")
    if not points:
        raise ConfigError("no replica fits into memory; free some memory, or serve fewer members")
    return points, time.monotonic() - started
