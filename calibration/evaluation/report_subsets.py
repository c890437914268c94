"""Reports the compared ensembles and the cascade: tables, JSON, lines for serve_config.yaml."""

from collections.abc import Mapping
from typing import Any

import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from calibration.evaluation.evaluate import Evaluation
from calibration.evaluation.subsets import (
    SubsetScore,
    SubsetsResult,
    cheapest_as_good,
    pareto_front,
)
from calibration.statistics import (
    SUGGESTED_WITHIN,
    CascadePoint,
    CascadeTally,
    Paired,
    cheapest_within,
)
from models.record import Precision

GEOMETRIC_MEAN = "configs.functions.geometric_mean:geometric_mean"
MAX_ROWS = 24  # of the table; JSON has all rows
LEAST_WEIGHT = 1e-4  # a member with less weight has no effect and need not be served
SUBSETS_NOTE = (
    "judged on images that no weight was fitted to, but the front and the choice are of these same "
    "images, which flatters them a little; CPU-ms: the networks alone, at batch 8 on one thread; "
    "MB: what the process grew by for a network of that one batch size"
)
WITHIN = (0.001, SUGGESTED_WITHIN)  # of the ensemble's top-1, shown in the terminal
BETTER_FIRST = "{} alone is better than {} for no more CPU time: let it be the set's first member"
CASCADE_NOTE = (
    "chosen on these same images, which flatters it a little; CPU-ms: the networks alone, at "
    "batch 8 on one thread"
)


def points(fraction: float) -> str:
    """Return percentage points with their sign."""
    return f"{fraction * 100:+.2f}"


def interval_of(interval: tuple[float, float]) -> str:
    """Return percentage points from the lower to the upper bound."""
    return f"{points(interval[0])} to {points(interval[1])}"


def range_of(interval: tuple[float, float]) -> str:
    """Return the bounds of a share, 0 to 1."""
    return f"{interval[0]:.3f}-{interval[1]:.3f}"


def _rounded(interval: tuple[float, float]) -> list[float]:
    return [round(value, 4) for value in interval]


def subsets_json(result: SubsetsResult) -> dict[str, Any]:
    """Return every ensemble, which are on the front, and the suggested one."""
    scores, best = result.scores, cheapest_as_good(result.scores)
    front = pareto_front(scores)
    return {
        "precision": result.precision,
        "num_fitted": result.num_fitted,
        "num_judged": result.num_judged,
        "members": {
            name: {"cpu_ms_per_image": cost.cpu_ms, "memory_mb": cost.memory_mb}
            for name, cost in result.costs.items()
        },
        "ensembles": [_score_json(score, is_on_front=score in front) for score in scores],
        "suggested": {
            "name": best.name,
            "behind_best": round(best.behind.difference, 4),
            "behind_best_interval": _rounded(best.behind.interval),
            "setting": setting_lines(best, result),
            "block": settings_block(best, result),
        },
        "note": SUBSETS_NOTE,
    }


def _score_json(score: SubsetScore, *, is_on_front: bool) -> dict[str, Any]:
    return {
        "name": score.name,
        "members": list(score.members),
        "method": score.method,
        "weights": {name: round(weight, 4) for name, weight in score.weights.items()},
        "cascade_margin": score.margin,
        "top1": round(score.top1, 4),
        "top1_interval": _rounded(score.top1_interval),
        "nats": None if score.nats is None else round(score.nats, 4),
        "lost": round(score.lost.difference, 4),
        "lost_interval": _rounded(score.lost.interval),
        "behind_best": round(score.behind.difference, 4),
        "is_as_good_as_the_best": score.is_as_good_as_the_best,
        "cpu_ms_per_image": round(score.cpu_ms, 3),
        "memory_mb": round(score.memory_mb, 1),
        "is_on_front": is_on_front,
    }


def settings_block(score: SubsetScore, result: SubsetsResult) -> str:
    """Return the lines that replace ``args`` in serve_config.yaml, with its indentation."""
    served_as = _yaml(result.served_as, style='"')
    lines = [f"model_set: {served_as}", *setting_lines(score, result)]
    if result.precision != "INT8":
        lines.append(f"precision: {result.precision}")
    return "\n".join(["    args:", *(f"      {line}" for line in lines)])


def setting_lines(score: SubsetScore, result: SubsetsResult) -> list[str]:
    """Return the settings that serve this ensemble of the set."""
    lines = []
    served = _shares(result.manifest_weights)
    shares = _shares(score.weights)
    if shares != served:
        weights = ", ".join(f"{_yaml(name)}: {weight:g}" for name, weight in shares.items())
        lines.append(f"weights: {{{weights}}}")
    if score.method == "logistic":
        lines.append(f"combine: {GEOMETRIC_MEAN}")
    if score.margin is not None:
        lines.append(f"cascade_margin: {score.margin:g}")
    return lines


def _yaml(text: str, style: str | None = None) -> str:
    """Return a text on one line of YAML: quoted with a ``style``, or if it would be no text."""
    return yaml.safe_dump(text, default_style=style, width=10_000).partition("\n")[0]


def _shares(weights: Mapping[str, float]) -> dict[str, float]:
    """Return weights that sum to one, without negligible ones."""
    total = sum(weights.values())
    shares = {name: round(weight / total, 4) for name, weight in weights.items()}
    return {name: share for name, share in shares.items() if share >= LEAST_WEIGHT}


def show_subsets(console: Console, result: SubsetsResult) -> None:
    """Print the front, further rows up to the limit, and the settings for the suggestion."""
    scores = result.scores
    front, best = pareto_front(scores), cheapest_as_good(scores)
    others = [score for score in scores if score not in front and score.margin is None]
    title = (
        f"every ensemble, {result.precision}: weights fitted on {result.num_fitted} images, "
        f"judged on {result.num_judged} others; * on the Pareto front"
    )
    table = figures_table("ensemble", "", "top-1", "95 %", "CPU ms", "MB", title=title)
    rows = front + others[: max(0, MAX_ROWS - len(front))]
    for score in sorted(rows, key=lambda row: (row.cpu_ms, -row.top1)):
        cells = (f"{score.top1:.4f}", range_of(score.top1_interval), f"{score.cpu_ms:.2f}")
        mark = "*" if score in front else ""
        table.add_row(escape(score.name), mark, *cells, f"{score.memory_mb:.0f}")
    console.print(table)
    if len(front) + len(others) > len(rows):
        console.print(f"  ... and {len(front) + len(others) - len(rows)} more (--json has all)")
    console.print(
        f"cheapest that is not significantly worse than the best (McNemar's exact test): "
        f"{best.name}, {points(best.behind.difference)} points behind it "
        f"({interval_of(best.behind.interval)}); in place of args in serve_config.yaml:",
        markup=False,
    )
    console.print(settings_block(best, result), markup=False)
    console.print(f"  {SUBSETS_NOTE}", style="yellow", markup=False)


def cascade_json(measured: Evaluation) -> dict[str, Any]:
    """Return every point of every precision, and the suggested threshold."""
    return {
        precision: {
            "first": tally.first,
            "skipped": tally.others,
            "points": [_point_json(point) for point in points_of(measured, precision)],
            "setting": setting_line(tally, points_of(measured, precision)),
            "better_first": better_first(measured, precision),
            "note": CASCADE_NOTE,
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
        "top1_interval": _rounded(point.top1_interval),
        "lost": round(pair.difference, 4),
        "lost_interval": _rounded(pair.interval),
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
        lost = _lost(point.lost) if point.share_skipped else ""
        skipped, cpu_ms = f"{point.share_skipped:.0%}", f"{point.cpu_ms_per_image:.1f}"
        table.add_row(what, f"{point.top1:.4f}", lost, skipped, cpu_ms)
    for name in tally.others:  # a member that is good and cheap alone needs no cascade
        lost = _lost(measured.over_members[precision][name])
        cpu_ms = f"{measured.cpu_ms_per_image[name][precision]:.1f}"
        top1 = measured.tallies[precision][name].top1
        table.add_row(f"{name} alone", f"{top1:.4f}", lost, "", cpu_ms)
    console.print(table)
    if measured.subsets is None:  # otherwise these suggest what to serve
        console.print("for args in serve_config.yaml (off unless it is there):")
        console.print(f"  {setting_line(tally, points)}", markup=False)
    console.print(f"  {CASCADE_NOTE}", style="yellow", markup=False)
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
    return f"{points(pair.difference)} ({interval_of(pair.interval)})"


def figures_table(name: str, *columns: str, title: str | None = None) -> Table:
    """Return a table without rows: a column of names, then columns of figures."""
    table = Table(title=title)
    table.add_column(name, overflow="fold")
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table
