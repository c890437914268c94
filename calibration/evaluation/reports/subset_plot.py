"""Plots ensembles: top-1 against CPU time, memory as the marks' size, and the Pareto front."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from calibration.evaluation.reports.plots import COLORS, MEMBER_COLORS, STYLE, svg_of
from calibration.evaluation.subsets.scores import (
    SubsetScore,
    SubsetsResult,
    cheapest_as_good,
    pareto_front,
)
from models.errors import ModelSetError
from models.result_files import write_result

SUFFIXES = (".svg", ".png")
OF_METHOD = {  # colour and mark
    "average": (COLORS["ensemble"], "o"),
    "logistic": (MEMBER_COLORS[2], "v"),
}
OF_CASCADE = MEMBER_COLORS[3]
LARGEST_MARK = 140.0  # points squared, for the most memory
SMALLEST_MARK = 18.0
MAX_NAMED = 8  # of the front, since more names would overlap


def check_plot(path: Path) -> None:
    """Raise :class:`ModelSetError` if the plot cannot be written to ``path``."""
    if path.suffix.lower() not in SUFFIXES:
        raise ModelSetError(f"--plot {path}: give a name that ends in .svg or .png")


def write_plot(path: Path, result: SubsetsResult) -> None:
    """Write the plot as SVG or PNG, by the name's end, in one step."""
    with mpl.rc_context(STYLE):
        figure = drawn(result)
        if path.suffix.lower() == ".svg":
            content = svg_of(figure).encode()
        else:
            png = io.BytesIO()
            figure.savefig(png, format="png", bbox_inches="tight")
            content = png.getvalue()
    write_result(path, content)


def subsets_svg(result: SubsetsResult) -> str:
    """Return the plot as inline SVG."""
    with mpl.rc_context(STYLE):
        return svg_of(drawn(result))


def drawn(result: SubsetsResult) -> Figure:
    """Plot every ensemble with its 95 % interval, the cascade's curve and the Pareto front.

    The line is the front of top-1 against CPU time. Ensembles on the front only for their memory
    are named, but not on the line.
    """
    scores = result.scores
    front, best = pareto_front(scores), cheapest_as_good(scores)
    figure = Figure(figsize=(8, 5), dpi=150)
    axes = figure.add_subplot()
    most_mb = max(score.memory_mb for score in scores) or 1.0
    for method, (color, mark) in OF_METHOD.items():
        these = [s for s in scores if s.method == method and s.margin is None]
        _marks(axes, these, color, mark, most_mb, method)
    cascade = [score for score in scores if score.margin is not None]
    if cascade:
        _curve(axes, cascade)
    _front_line(axes, front)
    axes.set_xlim(0, 1.05 * max(score.cpu_ms for score in scores))
    for score in _named(front, best):
        is_right = score.cpu_ms > axes.get_xlim()[1] / 2
        facts: dict[str, Any] = {
            "xytext": (-6 if is_right else 6, 8 if score is best else -11),
            "ha": "right" if is_right else "left",
            "weight": "bold" if score is best else "normal",
        }
        at = (score.cpu_ms, score.top1)
        axes.annotate(score.name, at, textcoords="offset points", fontsize=7, **facts)
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
    below = [max(0.0, s.top1 - s.top1_interval[0]) for s in scores]  # rounding may make it negative
    above = [max(0.0, s.top1_interval[1] - s.top1) for s in scores]
    axes.errorbar(x, y, (below, above), fmt="none", ecolor=color, alpha=0.25, linewidth=0.8)
    sizes = [max(SMALLEST_MARK, LARGEST_MARK * s.memory_mb / most_mb) for s in scores]
    axes.scatter(x, y, sizes, color=color, marker=mark, alpha=0.75, label=label, linewidths=0)


def _curve(axes: Any, cascade: Sequence[SubsetScore]) -> None:
    x = [s.cpu_ms for s in cascade]
    low, high = zip(*(s.top1_interval for s in cascade), strict=True)
    axes.fill_between(x, low, high, color=OF_CASCADE, alpha=0.1, linewidth=0)
    y = [s.top1 for s in cascade]
    axes.plot(x, y, ".-", color=OF_CASCADE, markersize=4, linewidth=0.8, label="cascade")


def _front_line(axes: Any, front: Sequence[SubsetScore]) -> None:
    by_cpu_time = [s for i, s in enumerate(front) if all(s.top1 > o.top1 for o in front[:i])]
    axes.plot(
        [s.cpu_ms for s in by_cpu_time],
        [s.top1 for s in by_cpu_time],
        color="#222222",
        linewidth=0.9,
        linestyle="--",
        drawstyle="steps-post",
        label="Pareto front",
        zorder=1,
    )


def _named(front: Sequence[SubsetScore], best: SubsetScore) -> list[SubsetScore]:
    """Return the ensembles to name in the plot: some of the front, evenly, and the suggested."""
    plain = [score for score in front if score.margin is None and score is not best]
    step = max(1, -(-len(plain) // MAX_NAMED))
    return [*plain[::step], best]
