"""Reports the comparison of ensembles: a table, the lines for serve_config.yaml, JSON."""

from collections.abc import Mapping
from typing import Any

import yaml
from rich.console import Console
from rich.markup import escape

from calibration.evaluation.reports.figures_table import figures_table
from calibration.evaluation.subsets.scores import (
    SubsetScore,
    SubsetsResult,
    cheapest_as_good,
    pareto_front,
)

GEOMETRIC_MEAN = "configs.functions.geometric_mean:geometric_mean"
MAX_ROWS = 24  # of the table; JSON has all rows
LEAST_WEIGHT = 1e-4  # a member with less weight has no effect and need not be served
NOTE = (
    "judged on images that no weight was fitted to, but the front and the choice are of these same "
    "images, which flatters them a little; CPU-ms: the networks alone, at batch 8 on one thread; "
    "MB: what the process grew by for a network of that one batch size"
)


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
            "behind_best_interval": [round(value, 4) for value in best.behind.interval],
            "setting": setting_lines(best, result),
            "block": settings_block(best, result),
        },
        "note": NOTE,
    }


def _score_json(score: SubsetScore, *, is_on_front: bool) -> dict[str, Any]:
    return {
        "name": score.name,
        "members": list(score.members),
        "method": score.method,
        "weights": {name: round(weight, 4) for name, weight in score.weights.items()},
        "cascade_margin": score.margin,
        "top1": round(score.top1, 4),
        "top1_interval": [round(value, 4) for value in score.top1_interval],
        "nats": None if score.nats is None else round(score.nats, 4),
        "lost": round(score.lost.difference, 4),
        "lost_interval": [round(value, 4) for value in score.lost.interval],
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
        table.add_row(escape(score.name), "*" if score in front else "", *_cells(score))
    console.print(table)
    if len(front) + len(others) > len(rows):
        console.print(f"  ... and {len(front) + len(others) - len(rows)} more (--json has all)")
    low, high = (bound * 100 for bound in best.behind.interval)
    console.print(
        f"cheapest that is not significantly worse than the best (McNemar's exact test): "
        f"{best.name}, {best.behind.difference * 100:+.2f} points behind it ({low:+.2f} to "
        f"{high:+.2f}); in place of args in serve_config.yaml:",
        markup=False,
    )
    console.print(settings_block(best, result), markup=False)
    console.print(f"  {NOTE}", style="yellow", markup=False)


def _cells(score: SubsetScore) -> tuple[str, ...]:
    low, high = score.top1_interval
    return (
        f"{score.top1:.4f}",
        f"{low:.3f}-{high:.3f}",
        f"{score.cpu_ms:.2f}",
        f"{score.memory_mb:.0f}",
    )
