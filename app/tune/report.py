"""Reports a tuning run as a table, JSON and a plot."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from app.tune.pareto import Point, front
from models.extras import needs_extra

NOT_IN_IT = (
    "measured inside the processes: HTTP and Ray are not in it, they add a few ms and percent; "
    "tandem bench against the running service measures all"
)
WAVERING = 0.2  # spread of throughput among a point's runs that is reported
# Units stand on a second line, to fit into 80 columns.
COLUMNS = ("replicas", "streams", "batch\nsizes", "clients", "images\n/s", "p50\nms", "p99\nms")


def show(console: Console, points: Sequence[Point], chosen: Point | None) -> None:
    """Print the Pareto front, lowest p99 first, and the chosen point's row in bold."""
    rows = front(points)
    if chosen is not None and chosen not in rows:  # nearly as fast as the front, with less memory
        rows = sorted([*rows, chosen], key=lambda p: p.throughput)
    table = Table()
    for column in (*COLUMNS, ""):
        table.add_column(column, no_wrap=True, justify="right" if column else "left")
    for point in rows:
        is_chosen = point == chosen
        table.add_row(*_cells(point), "chosen" if is_chosen else "", style="bold" * is_chosen)
    console.print(table)
    console.print(
        "2 x 4: two replicas of four cores, or two streams of four threads in each replica;\n"
        "clients of all replicas together; p50 and p99: latencies"
    )
    console.print(NOT_IN_IT)
    spread = median(point.spread for point in points)
    if spread > WAVERING:
        console.print(
            f"[yellow]runs of one point differ by {spread:.0%}[/] (the median of all points): "
            "something else uses this machine; tune again when it rests, or with more --seconds"
        )


def _cells(point: Point) -> list[str]:
    layout = point.candidate.layout
    return [
        f"{layout.replicas} x {layout.cores}",
        f"{layout.streams} x {layout.threads}",
        " ".join(map(str, point.candidate.batch_sizes)),
        str(point.clients),
        f"{point.throughput:.1f}",
        f"{point.p50_ms:.0f}",
        f"{point.p99_ms:.0f}",
    ]


def as_json(points: Sequence[Point], chosen: Point | None) -> dict[str, Any]:
    """Return every point, whether it is on the front, and the chosen one (or null)."""
    best = front(points)
    return {
        "not_included": "HTTP and Ray",
        "points": [{**point.as_json(), "is_on_front": point in best} for point in points],
        "chosen": None if chosen is None else chosen.as_json(),
    }


def plot(path: Path, points: Sequence[Point], chosen: Point | None, p99_ms: float | None) -> None:
    """Draw p99 against throughput: every point, the front as a line, the chosen one marked."""
    with needs_extra("calibrate", "tune --plot"):
        import matplotlib as mpl
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter
    style: dict[Any, Any] = {"axes.spines.top": False, "axes.spines.right": False}
    with mpl.rc_context(style):
        figure = Figure(figsize=(7, 4.2))
        axes = figure.add_subplot()
        axes.plot(*_places(points), "o", color="#b9c4cc", markersize=5, label="measured")
        axes.plot(*_places(front(points)), "-o", color="#1b6f5f", label="best trade-off")
        if p99_ms is not None:
            axes.axhline(p99_ms, color="#999999", linewidth=1, linestyle="--")
            axes.annotate(
                f"p99 asked for: {p99_ms:g} ms",
                (0, p99_ms),
                xycoords=("axes fraction", "data"),
                va="bottom",
                color="#666666",
            )
        if chosen is not None:
            axes.plot(*_places([chosen]), "*", color="#c8703a", markersize=16, label=_label(chosen))
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_xlim(left=0)
        axes.set_xlabel("throughput, images/s (without HTTP and Ray)")
        axes.set_ylabel("p99, ms")
        axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
        figure.savefig(path, bbox_inches="tight", dpi=150)


def _places(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [p.throughput for p in points], [p.p99_ms for p in points]


def _label(point: Point) -> str:
    layout, batches = str(point.candidate).split("; ")
    return f"chosen: {layout},\n{batches}; {point.clients} clients"
