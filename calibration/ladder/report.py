"""A ladder's figures as a table and as JSON."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from calibration.ladder.job import LadderJob
from calibration.ladder.rung import RungResult
from calibration.ladder.rungs import Rung

OF_THE_RUNGS = ("torch", "torchvision", "onnxruntime", "nncf")
# "Optimizing PyTorch Model Inference on CPU" (Towards Data Science, 2025): its first and last step.
PUBLISHED = {
    "samples_per_s": [22.76, 482.0],
    "steps": 13,
    "machine": "Amazon EC2 c7i.xlarge, 4 vCPUs (Xeon, AMX)",
    "source": "Optimizing PyTorch Model Inference on CPU, Towards Data Science, 2025",
}
PUBLISHED_SPEED_UP = 482.0 / 22.76


@dataclass(frozen=True)
class Row:
    """A rung's result with its speed-ups."""

    rung: Rung
    result: RungResult
    over_first: float | None  # by images/s; None: not measured
    over_previous: float | None  # against the last measured rung before it

    def as_json(self) -> dict[str, Any]:
        """Return plain values; the names include the units."""
        result = self.result
        facts: dict[str, Any] = {
            "name": self.rung.name,
            "title": self.rung.title,
            "outcome": result.outcome,
        }
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
        result = results[rung.name]
        if result.figures is None:
            rows.append(Row(rung, result, None, None))
            continue
        rate = result.figures.images_per_s
        first, previous = first or rate, previous or rate
        rows.append(Row(rung, result, round(rate / first, 2), round(rate / previous, 2)))
        previous = rate
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
        "images": None if job.asked.images is None else str(job.asked.images),
        "seconds": job.asked.seconds,
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
    console.print(f"{job.network.name} at {job.network.size} px, {job.cores} cores; {escape(kind)}")
    console.print(
        "each rung adds to the fastest earlier rung of its runtime; p50: of a call, which\n"
        "has the batch's images; use: of all cores, and its standard deviation over the run; the\n"
        "service decodes JPEGs, the other rungs have pixels"
    )
    if (comparison := against_published(rows)) is not None:
        console.print(comparison)


def _table(rows: list[Row]) -> Table:
    has_top1, has_watts = has_figure(rows, "top1"), has_figure(rows, "watts")
    # Units stand on a second line, without lines between columns, to fit into 80 columns.
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    table.add_column("rung", overflow="fold")
    names = ["batch", "images\n/s", "p50\nms", "CPU\nms", "PSS\nMiB", "use\n%", "±"]
    names += ["W"] * has_watts + ["top-1"] * has_top1 + ["x\nfirst", "x one\nbefore"]
    for name in names:
        table.add_column(name, no_wrap=True, justify="right")
    for row in rows:
        if (figures := row.result.figures) is None:
            table.add_row(row.rung.title, row.result.outcome, style="dim")
            continue
        memory = figures.rss_mib if figures.pss_mib is None else figures.pss_mib
        cells = [
            row.rung.title,
            str(row.result.chosen.batch),
            f"{figures.images_per_s:.1f}",
            f"{figures.p50_ms:.1f}",
            f"{figures.cpu_ms_per_image:.1f}",
            f"{memory:.0f}",
            f"{figures.utilisation * 100:.0f}",
            f"{figures.utilisation_spread * 100:.0f}",
        ]
        cells += [_or_dash(figures.watts, "{:.0f}")] * has_watts
        cells += [_or_dash(figures.top1, "{:.3f}")] * has_top1
        cells += [_or_dash(row.over_first, "{:.2f}"), _or_dash(row.over_previous, "{:.2f}")]
        table.add_row(*cells)
    return table


def has_figure(rows: list[Row], name: str) -> bool:
    """Whether any rung has this figure; otherwise the table omits its column."""
    return any(getattr(row.result.figures, name, None) is not None for row in rows)


def _or_dash(value: float | None, shape: str) -> str:
    return "-" if value is None else shape.format(value)


def against_published(rows: list[Row]) -> str | None:
    """Compare the ladder with the published one; None unless both begin with the same rung."""
    measured = [row for row in rows if row.over_first is not None]
    if not measured or measured[0].rung.name != "eager":
        return None
    best = max(measured, key=lambda row: row.over_first or 0.0)
    return (
        f"from eager PyTorch to {best.rung.title}: {best.over_first:.1f} times; the published "
        f"ladder on 4 vCPUs went {PUBLISHED_SPEED_UP:.1f} times in 13 steps, 22.76 to 482 samples/s"
    )
