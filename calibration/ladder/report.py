"""Reports a ladder's figures: the table, the JSON, the plot (SVG) and the page (HTML)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from calibration.ladder.rungs import SERVICE, Figures, LadderJob, Rung, RungResult
from models.image import size_text
from models.machine import needs_extra

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
