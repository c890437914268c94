"""``tandem ladder``: what each optimisation of a network is worth on this machine.

Its report is a table, JSON, a plot (SVG) and a page (HTML).
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from platformdirs import user_cache_path
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from calibration.commands.models import JsonFile, ModelDirs, check_file, err, out
from calibration.ladder.ladder import Ladder
from calibration.ladder.rungs import (
    SERVICE,
    Figures,
    LadderError,
    LadderJob,
    Rung,
    RungNetwork,
    RungResult,
)
from calibration.ladder.rungs import rungs as every_rung
from models.files import check_can_write, needed_folder, write_json, write_result
from models.image import sides_of, size_text
from models.machine import available_cpus, describe_machine, needs_extra
from models.model_set import ModelSet, load_model_set, search_path

INTERRUPTED = 130  # the exit code of a program that Ctrl-C ended
RESTORABLE = ("resnet50",)  # whose PyTorch weights calibration.sets.convert can restore
SIZES = range(32, 1025)
MAX_CLASSES = 100_000
PACKAGES = ("torch", "torchvision", "onnxruntime", "nncf")  # of the rungs, whose versions count
# "Optimizing PyTorch Model Inference on CPU" (Towards Data Science, 2025): its first and last step.
PUBLISHED = {
    "samples_per_s": [22.76, 482.0],
    "steps": 13,
    "machine": "Amazon EC2 c7i.xlarge, 4 vCPUs (Xeon, AMX)",
    "source": "Optimizing PyTorch Model Inference on CPU, Towards Data Science, 2025",
}
PUBLISHED_SPEED_UP = 482.0 / 22.76
COLORS = {
    "torch": "#c8703a",
    "onnxruntime": "#8a5a9e",
    "openvino": "#4a6fa5",
    "ensemble": "#9a8a2b",
    SERVICE: "#1b6f5f",
}


@dataclass(frozen=True)
class LadderOptions:
    """The options of the command line."""

    network: Annotated[
        str,
        typer.Argument(
            metavar="NETWORK", help="a model set, or with --random-weights a torchvision name"
        ),
    ]
    random_weights: Annotated[
        bool,
        typer.Option("--random-weights", help="torchvision's network of that name: speed only"),
    ] = False
    member: Annotated[str | None, typer.Option(help="of the set  (default: its first)")] = None
    size: Annotated[int | None, typer.Option(help="px, of --random-weights  (default: 224)")] = None
    classes: Annotated[int | None, typer.Option(help="of --random-weights  (default: 1000)")] = None
    images: Annotated[
        Path | None,
        typer.Option(help="ImageFolder or CSV of file,label: for top-1 and the fast plan"),
    ] = None
    max_images: Annotated[int, typer.Option(min=0, help="a random sample this large; 0: all")] = 200
    seconds: Annotated[float, typer.Option(help="s of measuring, each rung; there are some 19")] = (
        10.0
    )
    rungs: Annotated[str | None, typer.Option(help="only these, with commas  (default: all)")] = (
        None
    )
    cascade_margin: Annotated[float | None, typer.Option(hidden=True)] = None  # what fast was
    work: Annotated[
        Path | None,
        typer.Option(help="folder for results on the way  (default: in the user's cache)"),
    ] = None
    resume: Annotated[
        bool, typer.Option("--resume", help="keep what was measured, do the rest")
    ] = False
    json_file: JsonFile = None
    plot: Annotated[Path | None, typer.Option(help="images/s by rung as a plot, .svg")] = None
    html: Annotated[Path | None, typer.Option(help="write a page with table and plot")] = None
    model_dir: ModelDirs = None


def ladder(asked: LadderOptions) -> None:
    """Measure a network from eager PyTorch to the service, one optimisation after another.

    Each rung runs in a process of its own, some 19 of them in about ten minutes. One that this
    machine or installation cannot run is skipped, and it says why. Let nothing else run meanwhile.
    Exit code 1: a rung failed, or none was measured.
    """
    if not (math.isfinite(asked.seconds) and 0 < asked.seconds <= 600):
        raise LadderError(f"--seconds is {asked.seconds}; it must be above 0 and at most 600")
    if asked.cascade_margin is not None:
        raise LadderError(
            "--cascade-margin is an option no more: the rung fast runs the set's own fast plan, "
            "which tandem evaluate SET --images DIR --plan makes"
        )
    _check_files(asked)
    job = plan(asked, needed_folder(user_cache_path, "ladder"))
    started = time.monotonic()
    try:
        with err.status("starting") as status:
            run = Ladder(job, lambda doing: status.update(escape(doing)))
            results = run.run(is_resumed=asked.resume)
    except KeyboardInterrupt:
        err.print(
            f"stopped; what was measured is in {escape(str(job.work))}: the same command with "
            "--resume goes on"
        )
        raise typer.Exit(INTERRUPTED) from None
    rows = rows_of(job, results)
    content = as_json(job, rows, describe_machine(PACKAGES), time.monotonic() - started)
    title = f"{job.network.name} at {size_text(job.network.size)} px, {job.cores} cores"
    if str(asked.json_file) != "-":
        show(out, job, rows)
    if asked.plot is not None:
        write_result(asked.plot, draw(rows, title))
    if asked.html is not None:
        write_result(asked.html, render(content, rows, title))
    write_json(asked.json_file, content)
    outcomes = {result.outcome for result in results.values()}
    if "failed" in outcomes or "measured" not in outcomes:
        raise typer.Exit(1)


def _check_files(asked: LadderOptions) -> None:
    """Find out before minutes of measuring whether the results have a place to go."""
    check_can_write(asked.json_file)
    check_file(asked.plot, "--plot")
    check_file(asked.html, "--html")
    if asked.plot is not None and asked.plot.suffix.lower() != ".svg":
        raise LadderError(f"--plot {asked.plot}: a name that ends with .svg")
    if asked.plot is not None or asked.html is not None:
        with needs_extra("calibrate", "ladder --plot and --html"):
            import jinja2  # noqa: F401
            import matplotlib  # noqa: F401


def plan(asked: LadderOptions, cache: Path) -> LadderJob:
    """Find the network and check the options; ``cache`` holds work folders without ``--work``.

    Raises:
        LadderError: an option is wrong, or does not go with the others.
        ModelSetError: there is no set or member of that name.
    """
    every = {rung.name: rung for rung in every_rung(available_cpus())}
    only = asked.rungs.split(",") if asked.rungs else every
    for name in only:
        if name not in every:
            raise LadderError(f"--rungs {name!r}: there are {', '.join(every)}")
    chosen = tuple(rung for rung in every.values() if rung.name in only)
    job = (_random_job if asked.random_weights else _job_of_set)(asked, chosen, cache)
    return replace(job, images=asked.images, max_images=asked.max_images, seconds=asked.seconds)


def _job_of_set(asked: LadderOptions, chosen: tuple[Rung, ...], cache: Path) -> LadderJob:
    for option, value in (("--size", asked.size), ("--classes", asked.classes)):
        if value is not None:
            raise LadderError(f"{option} is of --random-weights; a model set has its own")
    model_set = load_model_set(asked.network, search_path(asked.model_dir or ()))
    manifest = model_set.manifest
    if asked.images is not None and manifest.is_multi_label:
        raise LadderError(
            f"--images: {model_set.name} is multi-label and has no top-1; its rungs are measured "
            "for speed alone, and tandem evaluate measures its accuracy"
        )
    name = asked.member or manifest.members[0].name
    own = manifest.member(name).networks
    network = RungNetwork(
        name=name,
        size=manifest.image_of(name).input_size,
        num_classes=manifest.num_classes,
        model_set=model_set.folder.absolute(),
        torch_source="float_ir" if name in RESTORABLE and "FP16" in own else "none",
    )
    work = (asked.work or cache / f"{model_set.name}-{name}").absolute()
    # The later rungs use all members.
    hashes = [n.fingerprint for _, n in sorted(own.items())] + [*model_set.fingerprints.values()]
    impossible = {rung.name: why for rung in chosen if (why := _why_not(rung, network, model_set))}
    return LadderJob(network, chosen, work, impossible, fingerprint="-".join(hashes))


def _random_job(asked: LadderOptions, chosen: tuple[Rung, ...], cache: Path) -> LadderJob:
    for option, value in (("--member", asked.member), ("--images", asked.images)):
        if value is not None:
            raise LadderError(f"{option} with --random-weights: random weights classify nothing")
    size, num_classes, name = asked.size or 224, asked.classes or 1000, asked.network.lower()
    if size not in SIZES:
        raise LadderError(f"--size is {size}; give {SIZES[0]} to {SIZES[-1]} px")
    if not 2 <= num_classes <= MAX_CLASSES:
        raise LadderError(f"--classes is {num_classes}; give 2 to {MAX_CLASSES}")
    if not name.replace("_", "").isalnum() or not name[0].isalpha():
        raise LadderError(f"{asked.network!r} is no name of a torchvision network")
    work = (asked.work or cache / f"{name}-{size}-random").absolute()
    network = RungNetwork(
        name=name,
        size=size,
        num_classes=num_classes,
        model_set=work / f"{name}-random",
        torch_source="random",
    )
    why = f"{name} is one network: there is no ensemble"
    impossible = {rung.name: why for rung in chosen if rung.engine == "ensemble"}
    return LadderJob(network, chosen, work, impossible)


def _why_not(rung: Rung, network: RungNetwork, model_set: ModelSet) -> str:
    manifest, is_ensemble = model_set.manifest, rung.engine == "ensemble"
    own, called = manifest.member(network.name).networks, f"{network.name} of {model_set.name}"
    lacking = [m.name for m in manifest.members if m.precision_of("INT8") not in m.networks]
    if rung.engine in ("torch", "onnxruntime") and network.torch_source == "none":
        return (
            f"{called} has no PyTorch source; the speed of a torchvision "
            f"network: tandem ladder NAME --random-weights --size {max(sides_of(network.size))}"
        )
    if rung.engine == "openvino" and rung.name != "int8" and "FP16" not in own:
        return f"{called} has no float network"
    if rung.name == "int8" and not own.keys() & {"FP16", "INT8"}:
        return f"{called} has no OpenVINO network"
    if is_ensemble and len(manifest.members) < 2:
        return f"{model_set.name} has one member"
    if (is_ensemble or rung.name == SERVICE) and lacking:
        return f"no INT8 of {', '.join(lacking)}: tandem quantize {model_set.argument} makes it"
    if rung.name == "fast":
        return manifest.plan_problem("INT8", model_set.argument) or ""
    return ""


@dataclass(frozen=True)
class Row:
    """A rung's result with its speed-ups."""

    rung: Rung
    result: RungResult
    over_first: float | None = None  # by images/s; None: not measured
    over_previous: float | None = None  # against the last measured rung before it

    @property
    def rate(self) -> float:
        """Return the rung's images/s; 0 if it was not measured."""
        return 0.0 if self.result.figures is None else self.result.figures.images_per_s

    def as_json(self) -> dict[str, Any]:
        """Return plain values; the names include the units."""
        result = self.result
        facts = {"name": self.rung.name, "title": self.rung.title, "outcome": result.outcome}
        if result.figures is None:
            return facts | {"reason": result.reason}
        return facts | {
            **result.figures.model_dump(mode="json"),
            "speedup_over_first": self.over_first,
            "speedup_over_previous": self.over_previous,
            "prepared_s": result.prepared_s,
            "options": result.chosen.model_dump(mode="json", exclude_defaults=True),
            "notes": list(result.notes),
        }


def rows_of(job: LadderJob, results: Mapping[str, RungResult]) -> list[Row]:
    """Return the rungs in their order, with their speed-ups."""
    rows: list[Row] = []
    first = previous = 0.0
    for rung in job.rungs:
        row = Row(rung, results[rung.name])
        if rate := row.rate:
            first, previous = first or rate, previous or rate
            row = Row(rung, row.result, round(rate / first, 2), round(rate / previous, 2))
            previous = rate
        rows.append(row)
    return rows


def as_json(
    job: LadderJob, rows: list[Row], machine: dict[str, Any], took_s: float
) -> dict[str, Any]:
    """Return all measurements with the machine and versions that they were made with."""
    network = job.network
    return {
        "machine": machine,
        "network": network.name,
        "input_size": network.size,
        "num_classes": network.num_classes,
        "weights": "random" if network.is_random else str(network.model_set),
        "images": None if job.images is None else str(job.images),
        "seconds": job.seconds,
        "took_s": round(took_s, 1),
        "published": PUBLISHED,
        "rungs": [row.as_json() for row in rows],
    }


def show(console: Console, job: LadderJob, rows: list[Row]) -> None:
    """Print the table of the measured rungs, then why other rungs were skipped or failed.

    Below it are the network, the meaning of the columns, and the comparison with the published
    ladder.
    """
    console.print(_table(rows))
    for row in rows:
        if row.result.figures is None:
            color = "red" if row.result.outcome == "failed" else "yellow"
            console.print(
                f"[{color}]{row.result.outcome}[/] {row.rung.title}: {escape(row.result.reason)}"
            )
    kind = "random weights: speed only" if job.network.is_random else f"{job.network.model_set}"
    console.print(
        f"{job.network.name} at {size_text(job.network.size)} px, {job.cores} cores; {escape(kind)}"
    )
    console.print(
        "each rung adds to the fastest earlier rung of its runtime; p50: of a call, which\n"
        "has the batch's images; use: of all cores, and its standard deviation over the run; the\n"
        "service decodes JPEGs, the other rungs have pixels"
    )
    if comparison := against_published(rows):
        console.print(comparison)


# Heading, format and value, of a figure that every rung has if its name is "".
COLUMNS: tuple[tuple[str, str, str, Callable[[Row, Figures], float | None]], ...] = (
    ("", "batch", "d", lambda row, _: row.result.chosen.batch),
    ("", "images\n/s", ".1f", lambda row, _: row.rate),
    ("", "p50\nms", ".1f", lambda _, of: of.p50_ms),
    ("", "CPU\nms", ".1f", lambda _, of: of.cpu_ms_per_image),
    ("", "PSS\nMiB", ".0f", lambda _, of: of.rss_mib if of.pss_mib is None else of.pss_mib),
    ("", "use\n%", ".0f", lambda _, of: 100 * of.utilisation),
    ("", "±", ".0f", lambda _, of: 100 * of.utilisation_spread),
    ("watts", "W", ".0f", lambda _, of: of.watts),
    ("top1", "top-1", ".3f", lambda _, of: of.top1),
    ("", "x\nfirst", ".2f", lambda row, _: row.over_first),
    ("", "x one\nbefore", ".2f", lambda row, _: row.over_previous),
)


def _table(rows: list[Row]) -> Table:
    # Units stand on a second line, without lines between columns, to fit into 80 columns.
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    table.add_column("rung", overflow="fold")
    columns = [c for c in COLUMNS if not c[0] or has_figure(rows, c[0])]
    for _, heading, *_ in columns:
        table.add_column(heading, no_wrap=True, justify="right")
    for row in rows:
        if row.result.figures is None:
            table.add_row(row.rung.title, row.result.outcome, style="dim")
            continue
        values = [(value(row, row.result.figures), shape) for *_, shape, value in columns]
        cells = ["-" if value is None else f"{value:{shape}}" for value, shape in values]
        table.add_row(row.rung.title, *cells)
    return table


def has_figure(rows: list[Row], name: str) -> bool:
    """Whether any rung has this figure; otherwise the table omits its column."""
    return any(getattr(row.result.figures, name, None) is not None for row in rows)


def against_published(rows: list[Row]) -> str:
    """Compare the ladder with the published one; "" unless both begin with the same rung."""
    measured = [row.rung.name for row in rows if row.result.figures is not None]
    if measured[:1] != ["eager"]:
        return ""
    best = max(rows, key=lambda row: row.over_first or 0.0)
    return (
        f"from eager PyTorch to {best.rung.title}: {best.over_first:.1f} times; the published "
        f"ladder on 4 vCPUs went {PUBLISHED_SPEED_UP:.1f} times in 13 steps, 22.76 to 482 samples/s"
    )


def draw(rows: list[Row], title: str) -> str:
    """Return an SVG document with a bar for each rung, from top to bottom."""
    with needs_extra("calibrate", "ladder --plot"):
        from calibration.evaluation.report_page import bars
    notes = [
        row.result.outcome if row.over_first is None else f"{row.rate:.1f}  ({row.over_first:.1f}x)"
        for row in rows
    ]
    values = {row.rung.title: row.rate for row in rows}
    colors = [COLORS[row.rung.engine] for row in rows]
    published = PUBLISHED_SPEED_UP * next((row.rate for row in rows if row.rate), 0.0)
    mark = (published, f"the published ladder's {PUBLISHED_SPEED_UP:.1f}x")
    axis = "images/s (and times the first rung)"
    return bars(values, notes, colors, title, axis, mark if against_published(rows) else None)


def render(content: dict[str, Any], rows: list[Row], title: str) -> bytes:
    """Return the page; ``content`` is the content of ``--json``."""
    with needs_extra("calibrate", "ladder --html"):
        from markupsafe import Markup

        from calibration.evaluation.report_page import rendered
    return rendered(
        "calibration.ladder",
        "page.html.j2",
        r=content,
        title=title,
        plot=Markup(draw(rows, title)),  # matplotlib escapes the text
        has_watts=has_figure(rows, "watts"),
        has_top1=has_figure(rows, "top1"),
        published=against_published(rows),
    )
