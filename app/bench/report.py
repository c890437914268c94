"""A benchmark's figures as tables and as a plot."""

from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from app.bench.samples import Summary
from models.extras import needs_extra

KEPT_SHARE = 0.99  # of the requests, to be within the objective


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


def knee(summaries: list[Summary]) -> float | None:
    """Return the highest offered rate that the service keeps up with, as with all lower rates.

    The service keeps up if 99 of 100 requests are answered 200 within the objective. Refused and
    failed requests count as late ones.
    """
    highest = None
    for s in sorted((s for s in summaries if s.kind == "open"), key=lambda s: s.offered):
        if s.is_saturated or s.num_good < KEPT_SHARE * max(1, s.num_requests):
            break
        highest = s.offered
    return highest


def plot(path: Path, summaries: list[Summary], objective_ms: float) -> None:
    """Plot latency against the offered rate (open loops) or the clients (closed loops)."""
    with needs_extra("calibrate", "bench --plot"):
        import matplotlib as mpl
        from matplotlib.figure import Figure
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
        axes.axhline(objective_ms, color="#999999", linewidth=1, linestyle="--")
        axes.annotate("objective", (runs[0].offered, objective_ms), va="bottom", color="#666666")
        if (rate := knee(summaries)) is not None:
            axes.axvline(rate, color="#999999", linewidth=1, linestyle=":")
            axes.annotate(f"knee: {rate:g}/s", (rate, axes.get_ylim()[1]), va="top")
        axes.set_yscale("log")
        axes.set_xlabel("offered requests/s" if open_runs else "clients")
        axes.set_ylabel("latency, ms")
        axes.legend(frameon=False)
        figure.savefig(path, bbox_inches="tight", dpi=150)
