"""``tandem ladder``: what each optimisation of a network is worth on this machine."""

import math
import time
from pathlib import Path
from typing import Annotated

import typer
from platformdirs import user_cache_path
from rich.markup import escape

from calibration.commands.models import JsonFile, ModelDirs, check_file, err, out
from calibration.ladder.ladder import Ladder
from calibration.ladder.report import PACKAGES, as_json, draw, render, rows_of, show
from calibration.ladder.rungs import LadderError, LadderOptions, plan
from models.files import check_can_write, needed_folder, write_json, write_result
from models.machine import describe_machine, needs_extra

INTERRUPTED = 130  # the exit code of a program that Ctrl-C ended


def ladder(
    network: Annotated[
        str,
        typer.Argument(
            metavar="NETWORK", help="a model set, or with --random-weights a torchvision name"
        ),
    ],
    random_weights: Annotated[
        bool,
        typer.Option("--random-weights", help="torchvision's network of that name: speed only"),
    ] = False,
    member: Annotated[str | None, typer.Option(help="of the set  (default: its first)")] = None,
    size: Annotated[
        int | None, typer.Option(help="px, of --random-weights  (default: 224)")
    ] = None,
    classes: Annotated[
        int | None, typer.Option(help="of --random-weights  (default: 1000)")
    ] = None,
    images: Annotated[
        Path | None,
        typer.Option(help="ImageFolder or CSV of file,label: for top-1 and the cascade"),
    ] = None,
    max_images: Annotated[
        int, typer.Option(min=0, help="a random sample this large; 0: all")
    ] = 200,
    seconds: Annotated[
        float, typer.Option(help="s of measuring, each rung; there are some 19")
    ] = 10.0,
    rungs: Annotated[
        str | None, typer.Option(help="only these, with commas  (default: all)")
    ] = None,
    cascade_margin: Annotated[
        float, typer.Option(min=0.001, max=1, help="of the cascade's rung")
    ] = 0.5,
    work: Annotated[
        Path | None,
        typer.Option(help="folder for results on the way  (default: in the user's cache)"),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="keep what was measured, do the rest")
    ] = False,
    json_file: JsonFile = None,
    plot: Annotated[Path | None, typer.Option(help="images/s by rung as a plot, .svg")] = None,
    html: Annotated[Path | None, typer.Option(help="write a page with table and plot")] = None,
    model_dir: ModelDirs = None,
) -> None:
    """Measure a network from eager PyTorch to the service, one optimisation after another.

    Each rung runs in a process of its own, some 19 of them in about ten minutes. One that this
    machine or installation cannot run is skipped, and it says why. Let nothing else run meanwhile.
    Exit code 1: a rung failed, or none was measured.
    """
    if not (math.isfinite(seconds) and 0 < seconds <= 600):
        raise LadderError(f"--seconds is {seconds}; it must be above 0 and at most 600")
    _check_files(json_file, plot, html)
    asked = LadderOptions(
        network=network,
        is_random=random_weights,
        member=member,
        size=size,
        num_classes=classes,
        images=images,
        max_images=max_images,
        seconds=seconds,
        only=tuple(rungs.split(",")) if rungs else (),
        cascade_margin=cascade_margin,
        work=work,
        model_dirs=tuple(model_dir or ()),
    )
    job = plan(asked, needed_folder(user_cache_path, "ladder"))
    started = time.monotonic()
    try:
        with err.status("starting") as status:
            run = Ladder(job, lambda doing: status.update(escape(doing)))
            results = run.run(is_resumed=resume)
    except KeyboardInterrupt:
        err.print(
            f"stopped; what was measured is in {escape(str(job.work))}: the same command with "
            "--resume goes on"
        )
        raise typer.Exit(INTERRUPTED) from None
    rows = rows_of(job, results)
    content = as_json(job, rows, describe_machine(PACKAGES), time.monotonic() - started)
    title = f"{job.network.name} at {job.network.size} px, {job.cores} cores"
    if str(json_file) != "-":
        show(out, job, rows)
    if plot is not None:
        write_result(plot, draw(rows, title))
    if html is not None:
        write_result(html, render(content, rows, title))
    write_json(json_file, content)
    outcomes = {result.outcome for result in results.values()}
    if "failed" in outcomes or "measured" not in outcomes:
        raise typer.Exit(1)


def _check_files(json_file: Path | None, plot: Path | None, html: Path | None) -> None:
    """Find out before minutes of measuring whether the results have a place to go."""
    check_can_write(json_file)
    check_file(plot, "--plot")
    check_file(html, "--html")
    if plot is not None and plot.suffix.lower() != ".svg":
        raise LadderError(f"--plot {plot}: a name that ends with .svg")
    if plot is not None or html is not None:
        with needs_extra("calibrate", "ladder --plot and --html"):
            import jinja2  # noqa: F401
            import matplotlib  # noqa: F401
