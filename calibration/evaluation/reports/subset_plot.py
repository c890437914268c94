"""Plots ensembles: top-1 against CPU time, their memory as the marks' size, and the front."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from calibration.evaluation.reports.plots import COLORS, MEMBER_COLORS, STYLE, svg_of
from calibration.evaluation.subsets.scores import (
    SubsetScore,
    SubsetsResult,
    cheapest_good,
    pareto_front,
)
from models.errors import ModelSetError

SUFFIXES = (".svg", ".png")
OF_METHOD = {  # its colour and mark
    "plain": ("#4a6fa5", "o"),
    "served": (COLORS["ensemble"], "s"),
    "interpolated": (MEMBER_COLORS[0], "^"),
    "logistic": (MEMBER_COLORS[2], "v"),
}
LARGEST_MARK = 140.0  # points squared, of the most memory
SMALLEST_MARK = 18.0
MAX_NAMED = 8  # of the front: more would cover each other


def check_plot(path: Path) -> None:
    """Raise :class:`ModelSetError` if a plot cannot be written there."""
    if path.suffix.lower() not in SUFFIXES:
        raise ModelSetError(f"--plot {path}: give a name that ends in .svg or .png")


def write_plot(path: Path, result: SubsetsResult) -> None:
    """Write the plot as SVG or PNG, by the name's end, in one step."""
    partial = path.with_name(f".{path.name}.partial")
    with mpl.rc_context(STYLE):
        figure = drawn(result)
        if path.suffix.lower() == ".svg":
            partial.write_text(svg_of(figure), "utf-8")
        else:
            FigureCanvasAgg(figure).print_png(partial)
    partial.replace(path)


def subsets_svg(result: SubsetsResult) -> str:
    """Return the plot as inline SVG."""
    with mpl.rc_context(STYLE):
        return svg_of(drawn(result))


def drawn(result: SubsetsResult) -> Figure:
    """Draw every ensemble with its 95 % interval, the cascade's curve and the Pareto front."""
    scores = result.all
    front, best = pareto_front(scores), cheapest_good(scores)
    figure = Figure(figsize=(8, 5), dpi=150)
    axes = figure.add_subplot()
    most_mb = max(score.memory_mb for score in scores) or 1.0
    for method, (color, mark) in OF_METHOD.items():
        these = [s for s in scores if s.method == method and s.margin is None]
        _marks(axes, these, color, mark, most_mb, method)
    cascade = [score for score in scores if score.margin is not None]
    if cascade:
        x, y = [s.cpu_ms for s in cascade], [s.top1 for s in cascade]
        axes.plot(x, y, ".-", color="#9a8a2b", markersize=4, linewidth=0.8, label="cascade")
    axes.plot(
        [s.cpu_ms for s in front],
        [s.top1 for s in front],
        color="#222222",
        linewidth=0.9,
        linestyle="--",
        drawstyle="steps-post",
        label="Pareto front",
        zorder=1,
    )
    for score in _named(front, best):
        weight = "bold" if score is best else "normal"
        at = (score.cpu_ms, score.top1)
        facts: dict[str, Any] = {"textcoords": "offset points", "fontsize": 7, "weight": weight}
        axes.annotate(score.name, at, (5, -10), **facts)
    axes.set_xlim(left=0)
    axes.set_xlabel("CPU-ms per image, networks only (a mark's size: memory)")
    axes.set_ylabel(f"top-1 on {result.num_judged} images")
    axes.legend(frameon=False, loc="lower right")
    return figure


def _marks(
    axes: Any, scores: Sequence[SubsetScore], color: str, mark: str, most_mb: float, label: str
) -> None:
    if not scores:
        return
    x, y = [s.cpu_ms for s in scores], [s.top1 for s in scores]
    below = [max(0.0, s.top1 - s.top1_interval[0]) for s in scores]  # rounding may put it below
    above = [max(0.0, s.top1_interval[1] - s.top1) for s in scores]
    axes.errorbar(x, y, (below, above), fmt="none", ecolor=color, alpha=0.25, linewidth=0.8)
    sizes = [max(SMALLEST_MARK, LARGEST_MARK * s.memory_mb / most_mb) for s in scores]
    axes.scatter(x, y, sizes, color=color, marker=mark, alpha=0.75, label=label, linewidths=0)


def _named(front: Sequence[SubsetScore], best: SubsetScore) -> list[SubsetScore]:
    """Return what is named in the plot: ensembles of the front, evenly, and the suggested one."""
    plain = [score for score in front if score.margin is None and score is not best]
    step = max(1, -(-len(plain) // MAX_NAMED))
    return [*plain[::step], best]
