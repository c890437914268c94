"""Reports a search of plans, and how far answers can be relied on: tables and JSON."""

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from calibration.evaluation.plans import MAX_LOST, PlanSearch
from calibration.statistics import ModeTally
from models.record import Precision


def points(fraction: float) -> str:
    """Return percentage points with their sign."""
    return f"{fraction * 100:+.2f}"


def interval_of(interval: tuple[float, float]) -> str:
    """Return percentage points from the lower to the upper bound."""
    return f"{points(interval[0])} to {points(interval[1])}"


def range_of(interval: tuple[float, float]) -> str:
    """Return the bounds of a share, 0 to 1."""
    return f"{interval[0]:.3f}-{interval[1]:.3f}"


def plans_json(result: PlanSearch) -> dict[str, Any]:
    """Return the search for JSON: the plan as in the manifest, and every plan of the front."""
    return {
        "precision": result.precision,
        "cpu_ms_per_image": dict(result.cpu_ms),
        "plan": result.record.model_dump(mode="json", exclude_none=True),
        "verdict": verdict(result),
        "outcome": result.outcome,
        "num_more_images": result.num_more,
        "plans": [
            {
                "name": score.name,
                "is_chosen": score is result.best,
                "times_cheaper": round(score.speed, 3),
                "answered_at_step": list(score.shares),
                "judged": score.judged.model_dump(mode="json"),
                "chosen": score.chosen.model_dump(mode="json"),
            }
            for score in result.scores
        ],
    }


def verdict(result: PlanSearch) -> str:
    """Return in words what the judging images say of the chosen plan's loss."""
    limit, more = f"{MAX_LOST * 100:g} points", result.num_more
    if result.outcome == "verified":
        return f"its loss is within {limit}"
    if result.outcome == "refused":
        return f"it loses more than {limit}, and that is no chance"
    about = f"about {more:,} more images would tell" if more else "many more images would tell"
    return f"whether its loss is within {limit} is not known: {about}"


def show_plans(console: Console, result: PlanSearch) -> None:
    """Print the plans of the front with all members, and the chosen one."""
    figures = result.best.judged
    title = f"plans, {result.precision}: judged on {figures.num_images} images that chose nothing"
    columns = ("CPU\nms", "times\nless", "top-1", "points lost\n(95 %)", "answered\nat step")
    table = figures_table("plan", *columns, title=escape(title))
    full = f"{figures.full_cpu_ms:.1f}", "", f"{figures.full_top1:.4f}", "", ""
    table.add_row(f"full: {' + '.join(result.cpu_ms)}", *full)
    for score in result.scores:
        own = score.judged
        table.add_row(
            escape(score.name),
            f"{own.cpu_ms:.1f}",
            f"{score.speed:.2f}",
            f"{own.top1:.4f}",
            f"{points(own.lost)}\n({interval_of(own.lost_interval)})",
            "\n".join(f"{share:.0%}" for share in score.shares),
            style="bold" if score is result.best else None,
        )
    console.print(table)
    console.print(f"fast: {result.best.name}; {verdict(result)}", markup=False)
    how = "CPU-ms: the networks alone, an image in batches of 8"
    console.print(f"  {how}; p {figures.p_value:.2f} (McNemar)", markup=False)


def show_modes(console: Console, precision: Precision, modes: dict[str, ModeTally]) -> None:
    """Print for each mode how many answers are sure, and how many of these are right."""
    called = "float" if precision == "FP16" else precision
    num = next((tally.num_images for tally in modes.values()), 0)
    title = f"answers of {called}, on {num} images that fitted and chose nothing"
    columns = ("images", "top-1", "sure\nfrom", "sure", "of these\nright", "answer\nset")
    table = figures_table("answered by", *columns, title=title)
    for name, tally in modes.items():
        figures = tally.figures()
        sure, answer_set = figures["sure"], figures["answer_set"]
        cells = [str(tally.num_images), "" if figures["top1"] is None else f"{figures['top1']:.4f}"]
        if sure is None:
            cells += ["", "", ""]
        else:
            cells += [f"{sure['from']:.3f}", f"{sure['share']:.1%}", ""]
            if sure["right"] is not None:
                cells[-1] = f"{sure['right']:.1%}\n{range_of(sure['right_interval'])}"
        held = answer_set and f"{answer_set['coverage']:.1%}\nin {answer_set['mean_size']:.2f}"
        table.add_row(escape(name), *cells, held or "")
    console.print(table)


def figures_table(name: str, *columns: str, title: str | None = None) -> Table:
    """Return a table without rows: a column of names, then columns of figures."""
    table = Table(title=title)
    table.add_column(name, overflow="fold")
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table
