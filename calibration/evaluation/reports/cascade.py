"""Reports the cascade of an evaluation: a table, the line for serve_config.yaml, JSON."""

from typing import Any

from rich.console import Console
from rich.markup import escape

from calibration.evaluation.cascade import (
    SUGGESTED_WITHIN,
    CascadePoint,
    CascadeTally,
    cheapest_within,
)
from calibration.evaluation.evaluate import Evaluation
from calibration.evaluation.reports.figures_table import figures_table
from calibration.statistics import Paired
from models.record import Precision

WITHIN = (0.001, SUGGESTED_WITHIN)  # of the ensemble's top-1, shown in the terminal
BETTER_FIRST = "{} alone is better than {} for no more CPU time: let it be the set's first member"
NOTE = (
    "chosen on these same images, which flatters it a little; CPU-ms: the networks alone, at "
    "batch 8 on one thread"
)


def cascade_json(measured: Evaluation) -> dict[str, Any]:
    """Return every point of every precision, and the suggested threshold."""
    return {
        precision: {
            "first": tally.first,
            "skipped": tally.others,
            "points": [_point_json(point) for point in points_of(measured, precision)],
            "setting": setting_line(tally, points_of(measured, precision)),
            "better_first": better_first(measured, precision),
            "note": NOTE,
        }
        for precision, tally in measured.cascades.items()
    }


def points_of(measured: Evaluation, precision: Precision) -> list[CascadePoint]:
    """Return the curve with the CPU times that the same evaluation measured."""
    cpu_ms = {name: by.get(precision, 0.0) for name, by in measured.cpu_ms_per_image.items()}
    return measured.cascades[precision].curve(cpu_ms)


def _point_json(point: CascadePoint) -> dict[str, Any]:
    pair = point.lost
    return {
        "cascade_margin": point.margin,
        "top1": round(point.top1, 4),
        "top1_interval": [round(v, 4) for v in point.top1_interval],
        "lost": round(pair.difference, 4),
        "lost_interval": [round(v, 4) for v in pair.interval],
        "share_skipped": round(point.share_skipped, 4),
        "cpu_ms_per_image": round(point.cpu_ms_per_image, 2),
    }


def setting_line(tally: CascadeTally, points: list[CascadePoint]) -> str:
    """Return the line for serve_config.yaml: the cheapest within half a point of top-1."""
    full, best = points[0], cheapest_within(points, SUGGESTED_WITHIN)
    if not best.share_skipped:
        allowed = f"{SUGGESTED_WITHIN * 100:g} points of the ensemble"
        return f"cascade_margin: null  # no threshold within {allowed} skips anything"
    return (
        f"cascade_margin: {best.margin:g}  # top-1 {best.top1 * 100:.1f} % against "
        f"{full.top1 * 100:.1f} %, {best.share_skipped * 100:.0f} % of images skip "
        f"{', '.join(tally.others)}, {best.cpu_ms_per_image:.1f} instead of "
        f"{full.cpu_ms_per_image:.1f} CPU-ms"
    )


def better_first(measured: Evaluation, precision: Precision) -> list[str]:
    """Return the members that alone are better than the first one and cost no more."""
    tally, of = measured.cascades[precision], measured.tallies[precision]
    cpu_ms = {name: by.get(precision, 0.0) for name, by in measured.cpu_ms_per_image.items()}
    return [
        name
        for name in tally.others
        if of[name].top1 > of[tally.first].top1 and cpu_ms[name] <= cpu_ms[tally.first]
    ]


def show_cascade(console: Console, measured: Evaluation) -> None:
    """Print a few points of the served precision, and the setting for the suggested one."""
    if not measured.cascades:
        return
    precision: Precision = "INT8" if "INT8" in measured.cascades else "FP16"
    tally, points = measured.cascades[precision], points_of(measured, precision)
    called = "float" if precision == "FP16" else precision
    title = f"cascade, {called}: {', '.join(tally.others)} asked only where {tally.first} is unsure"
    columns = ("top-1", "points lost (95 %)", "skipped", "CPU ms")
    table = figures_table("cascade_margin", *columns, title=escape(title))
    for what, point in _chosen(points).items():
        table.add_row(what, *_cells(point))
    for name in tally.others:  # a member that is good and cheap alone needs no cascade
        lost = measured.over_members[precision][name]
        cpu_ms = measured.cpu_ms_per_image[name][precision]
        top1 = measured.tallies[precision][name].top1
        table.add_row(f"{name} alone", f"{top1:.4f}", _lost(lost), "", f"{cpu_ms:.1f}")
    console.print(table)
    if measured.subsets is None:  # otherwise these suggest what to serve
        console.print("for args in serve_config.yaml (off unless it is there):")
        console.print(f"  {setting_line(tally, points)}", markup=False)
    console.print(f"  {NOTE}", style="yellow", markup=False)
    for name in better_first(measured, precision):
        line = f"  {BETTER_FIRST.format(name, tally.first)}"
        console.print(line, style="yellow", markup=False)


def _chosen(points: list[CascadePoint]) -> dict[str, CascadePoint]:
    chosen = {"null (never skip)": points[0]}
    for allowed in WITHIN:
        point = cheapest_within(points, allowed)
        if point not in chosen.values():
            chosen[f"{point.margin:g} (within {allowed * 100:g})"] = point
    return chosen | {"always skip": points[-1]}


def _lost(pair: Paired) -> str:
    low, high = (f"{bound * 100:+.2f}" for bound in pair.interval)
    return f"{pair.difference * 100:+.2f} ({low} to {high})"


def _cells(point: CascadePoint) -> tuple[str, ...]:
    return (
        f"{point.top1:.4f}",
        _lost(point.lost) if point.share_skipped else "",
        f"{point.share_skipped:.0%}",
        f"{point.cpu_ms_per_image:.1f}",
    )
