"""Plots a ladder's throughput as SVG with matplotlib, and renders the HTML page."""

from typing import Any

from calibration.ladder.report import PUBLISHED_SPEED_UP, Row, against_published, has_figure
from models.extras import needs_extra

COLORS = {
    "torch": "#c8703a",
    "onnxruntime": "#8a5a9e",
    "openvino": "#4a6fa5",
    "ensemble": "#9a8a2b",
    None: "#1b6f5f",  # the service
}


def draw(rows: list[Row], title: str) -> str:
    """Return an SVG document with a bar for each rung, from top to bottom."""
    with needs_extra("calibrate", "ladder --plot"):
        import matplotlib as mpl
        from matplotlib.figure import Figure

        from calibration.evaluation.reports.plots import STYLE, svg_of
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8, 1.2 + 0.34 * len(rows)))
        axes = figure.add_subplot()
        rates = [0.0 if row.result.figures is None else _rate(row) for row in rows]
        colors = [COLORS[row.rung.engine] for row in rows]
        places = range(len(rows))
        axes.barh(places, rates, 0.7, color=colors)
        axes.set_yticks(places, [row.rung.title for row in rows])
        axes.invert_yaxis()
        for place, row, rate in zip(places, rows, rates, strict=True):
            axes.annotate(
                _label(row), (rate, place), (4, 0), textcoords="offset points", va="center"
            )
        _mark_published(axes, rows)
        axes.set_xlim(0, 1.25 * max([*rates, 1.0]))
        axes.set_xlabel("images/s (and times the first rung)")
        axes.set_title(title, loc="left")
        return svg_of(figure)


def _rate(row: Row) -> float:
    assert row.result.figures is not None
    return row.result.figures.images_per_s


def _label(row: Row) -> str:
    if row.over_first is None:
        return row.result.outcome
    return f"{_rate(row):.1f}  ({row.over_first:.1f}x)"


def _mark_published(axes: Any, rows: list[Row]) -> None:
    """Mark the published ladder's speed-up, if both ladders begin with the same rung."""
    first = next((row for row in rows if row.over_first is not None), None)
    if first is None or first.rung.name != "eager":
        return
    place = _rate(first) * PUBLISHED_SPEED_UP
    if place < 1.25 * max(_rate(row) for row in rows if row.over_first is not None):
        axes.axvline(place, color="#999999", linewidth=1, linestyle="--")
        axes.annotate(
            f"the published ladder's {PUBLISHED_SPEED_UP:.1f}x",
            (place, 0.98),  # next to the first rungs, whose bars are short
            xycoords=("data", "axes fraction"),
            rotation=90,
            ha="right",
            va="top",
            color="#666666",
        )


def render(content: dict[str, Any], rows: list[Row], title: str) -> bytes:
    """Return the page; ``content`` is the content of ``--json``."""
    with needs_extra("calibrate", "ladder --html"):
        from markupsafe import Markup

        from calibration.evaluation.reports.html import rendered
    return rendered(
        "calibration.ladder",
        "page.html.j2",
        r=content,
        title=title,
        plot=Markup(draw(rows, title)),  # matplotlib escapes the text
        has_watts=has_figure(rows, "watts"),
        has_top1=has_figure(rows, "top1"),
        published=against_published(rows) or "",
    )
