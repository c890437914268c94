"""Renders an evaluation as an HTML page that loads nothing from elsewhere, and draws its plots.

Jinja renders the page, and matplotlib draws inline SVG. The plot of plans shows top-1 against CPU
time.
"""

import io
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from calibration.evaluation.evaluate import Evaluation
from calibration.evaluation.plans import PlanSearch
from calibration.evaluation.report import points
from calibration.statistics import NUM_BINS, Tally
from models.files import write_result
from models.manifest import ENSEMBLE
from models.model_set import ModelSet
from models.record import Precision

MAX_CLASSES = 20  # the worst of more classes are shown
COLORS = {"ensemble": "#1b6f5f"}  # members get the other colours in turn
MEMBER_COLORS = ("#c8703a", "#4a6fa5", "#8a5a9e", "#9a8a2b")
STYLE: dict[Any, Any] = {  # matplotlib's type has one literal per key
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",
    "text.parse_math": False,  # labels may contain dollar signs
    "svg.hashsalt": "tandem",  # equal figures give equal files
}
LEGEND: dict[str, Any] = {  # above the axes: no line hides it, and rows of three fit the page
    "loc": "lower center",
    "bbox_to_anchor": (0.5, 1.0),
    "ncols": 3,
    "frameon": False,
}
SUFFIXES = (".svg", ".png")


def write_page(
    path: Path, model_set: ModelSet, content: dict[str, Any], measured: Evaluation
) -> None:
    """Write the page in one step; ``content`` is the content of ``--json``."""
    precision: Precision = "INT8" if "INT8" in measured.tallies else "FP16"
    tallies = measured.tallies[precision]
    lead = tallies.get(ENSEMBLE) or next(iter(tallies.values()))
    page = rendered(
        "calibration.evaluation",
        "report.html.j2",
        r=content,
        points=points,
        precision=precision,
        lead=next(name for name, tally in tallies.items() if tally is lead),
        names=[*content["fingerprints"], ENSEMBLE],
        num_classes=len(model_set.labels),
        max_classes=MAX_CLASSES,
        # matplotlib escapes what it draws: labels come from the set's files.
        per_class=Markup(per_class(tallies, model_set.labels)),
        confusion=Markup(confusion(lead, model_set.labels)),
        reliability=Markup(reliability(tallies)),
    )
    write_result(path, page)


def rendered(package: str, template: str, **values: Any) -> bytes:
    """Return a page of a package's template; characters that are not UTF-8 become ``?``."""
    environment = Environment(
        loader=PackageLoader(package, "."), autoescape=True, undefined=StrictUndefined
    )
    page = environment.get_template(template).render(values)
    return page.encode("utf-8", "replace")  # names of files need not be UTF-8


def svg_of(figure: Figure) -> str:
    """Return the figure as inline SVG."""
    text = io.StringIO()
    with warnings.catch_warnings():  # of glyphs that the browser draws
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from font", UserWarning)
        figure.savefig(text, format="svg", bbox_inches="tight", metadata={"Date": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


def color_of(name: str, names: list[str]) -> str:
    """Return the same colour for the same classifier in every plot."""
    if name in COLORS:
        return COLORS[name]
    members = [n for n in names if n not in COLORS]
    return MEMBER_COLORS[members.index(name) % len(MEMBER_COLORS)]


def worst_classes(tally: Tally) -> list[int]:
    """Return the classes of lowest top-1, worst first, those without images left out."""
    accuracy = tally.class_accuracy()
    present = [i for i, value in enumerate(accuracy) if value is not None]
    return sorted(present, key=lambda i: accuracy[i] or 0.0)[:MAX_CLASSES]


def per_class(tallies: dict[str, Tally], labels: tuple[str, ...]) -> str:
    """Draw the top-1 of every classifier within each class, the ensemble's worst class first."""
    names = list(tallies)
    lead = tallies.get("ensemble") or next(iter(tallies.values()))
    shown = worst_classes(lead)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8, 0.9 + 0.42 * len(shown)))
        axes = figure.add_subplot()
        height = 0.8 / len(names)
        for position, name in enumerate(names):
            accuracy = tallies[name].class_accuracy()
            rows = np.arange(len(shown)) + (position - (len(names) - 1) / 2) * height
            values = [accuracy[i] or 0.0 for i in shown]
            axes.barh(rows, values, height * 0.9, label=name, color=color_of(name, names))
        axes.set_yticks(np.arange(len(shown)), [labels[i] for i in shown])
        axes.invert_yaxis()
        axes.set_xlim(0, 1)
        axes.set_xlabel("top-1 within the class")
        axes.legend(**LEGEND)
        return svg_of(figure)


def confusion(tally: Tally, labels: tuple[str, ...]) -> str:
    """Plot the answers to images of the worst classes."""
    shown = worst_classes(tally)
    part = tally.confusion[np.ix_(shown, shown)].astype(float)
    totals = tally.confusion[shown].sum(axis=1, keepdims=True)
    shares: npt.NDArray[Any] = part / np.maximum(totals, 1)
    with mpl.rc_context(STYLE):
        side = 2.2 + 0.42 * len(shown)
        figure = Figure(figsize=(side, side))
        axes = figure.add_subplot()
        axes.imshow(shares, cmap="Greens", vmin=0, vmax=1)
        for row, column in np.ndindex(*shares.shape):
            if shares[row, column] >= 0.005:
                color = "white" if shares[row, column] > 0.6 else "black"
                text = f"{shares[row, column] * 100:.0f}"
                axes.text(column, row, text, ha="center", va="center", color=color)
        names = [labels[i] for i in shown]
        axes.set_xticks(range(len(shown)), names, rotation=45, ha="right")
        axes.set_yticks(range(len(shown)), names)
        axes.set_xlabel("answer (% of the class's images)")
        axes.set_ylabel("truth")
        return svg_of(figure)


def reliability(tallies: dict[str, Tally]) -> str:
    """Plot accuracy against confidence; calibrated probabilities are on the diagonal."""
    names = list(tallies)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.5, 5.5))
        upper, lower = figure.subplots(2, 1, height_ratios=(3, 1), sharex=True)
        upper.plot([0, 1], [0, 1], color="#999999", linewidth=1, linestyle="--")
        for name in names:
            bins, color = tallies[name].reliability, color_of(name, names)
            there = bins.counts > 0
            x = bins.confidence[there] / bins.counts[there]
            upper.plot(
                x, bins.right[there] / bins.counts[there], marker="o", color=color, label=name
            )
            centers = (np.arange(NUM_BINS) + 0.5) / NUM_BINS
            lower.plot(centers, bins.counts, color=color, drawstyle="steps-mid")
        upper.set_ylim(0, 1)
        upper.set_ylabel("accuracy")
        upper.legend(**LEGEND)
        lower.set_xlim(0, 1)
        lower.set_xlabel("confidence (probability of the first class)")
        lower.set_ylabel("images")
        return svg_of(figure)


def bars(
    values: Mapping[str, float],
    notes: Sequence[str],
    colors: Sequence[str],
    title: str,
    axis: str,
    mark: tuple[float, str] | None,
) -> str:
    """Draw a bar for each value, from top to bottom, with notes; ``mark`` is a line at a value."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8, 1.2 + 0.34 * len(values)))
        axes = figure.add_subplot()
        axes.barh(range(len(values)), [*values.values()], 0.7, color=colors)
        axes.set_yticks(range(len(values)), [*values])
        axes.invert_yaxis()
        for at, note in zip(enumerate(values.values()), notes, strict=True):
            axes.annotate(note, at[::-1], (4, 0), textcoords="offset points", va="center")
        limit = 1.25 * max(1.0, *values.values())
        if mark is not None and mark[0] < limit:
            axes.axvline(mark[0], color="#999999", linewidth=1, linestyle="--")
            top = (mark[0], 0.98)  # next to the first bars, which are short
            look: dict[str, Any] = {"rotation": 90, "ha": "right", "va": "top", "color": "#666666"}
            axes.annotate(mark[1], top, xycoords=("data", "axes fraction"), **look)
        axes.set_xlim(0, limit)
        axes.set_xlabel(axis)
        axes.set_title(title, loc="left")
        return svg_of(figure)


def write_plot(path: Path, result: PlanSearch) -> None:
    """Write the plot of plans as SVG or PNG, by the name's end, in one step."""
    with mpl.rc_context(STYLE):
        figure = drawn(result)
        if path.suffix.lower() == ".svg":
            content = svg_of(figure).encode()
        else:
            png = io.BytesIO()
            figure.savefig(png, format="png", bbox_inches="tight")
            content = png.getvalue()
    write_result(path, content)


def drawn(result: PlanSearch) -> Figure:
    """Plot top-1 against CPU time of all members, of every plan of the front, and the choice."""
    full = result.best.judged
    figure = Figure(figsize=(8, 5), dpi=150)
    axes = figure.add_subplot()
    x, y = [s.judged.cpu_ms for s in result.scores], [s.judged.top1 for s in result.scores]
    below = [max(0.0, s.judged.top1 - s.judged.top1_interval[0]) for s in result.scores]
    above = [max(0.0, s.judged.top1_interval[1] - s.judged.top1) for s in result.scores]
    axes.errorbar(x, y, (below, above), fmt="o", color=MEMBER_COLORS[0], alpha=0.5, label="plans")
    at_full = (full.full_cpu_ms, full.full_top1)
    axes.plot(*at_full, "s", color=COLORS["ensemble"], label="full: all members")
    axes.plot(full.cpu_ms, full.top1, "o", color=MEMBER_COLORS[1], label="fast: the choice")
    note: dict[str, Any] = {"textcoords": "offset points", "fontsize": 7}
    axes.annotate(result.best.name, (full.cpu_ms, full.top1), (6, 8), weight="bold", **note)
    axes.set_xlim(left=0)
    axes.set_xlabel("CPU-ms per image, networks only")
    axes.set_ylabel(f"top-1 on {full.num_images} images")
    axes.legend(frameon=False, loc="lower right")
    return figure
