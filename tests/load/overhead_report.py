"""Medians and ratios of tests/load/overhead.py's turns, and their table."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from models.model_set import load_model_set

Row = dict[str, Any]
BOUND, YARDSTICK, TANDEM, FAST = "bound", "yardstick", "tandem", "fast"
REFERENCES = (BOUND, YARDSTICK, TANDEM)
LEFT = "images_per_s_of_a_core_left"
FIGURES = (
    "images_per_s",
    "p50_ms",
    "p95_ms",
    "p99_ms",
    "cpu_ms",
    "generator_cpu_ms",
    "generator_cores",
    "others_cores",
    LEFT,
)
WIDTH = 150
err = Console(stderr=True, highlight=False, width=WIDTH)


def summary(rows: Sequence[Row]) -> dict[str, dict[str, Row]]:
    """Return medians by load and contestant; ratios and differences are those of each round."""
    loads = list(dict.fromkeys(row["load"] for row in rows))
    names = list(dict.fromkeys(row["contestant"] for row in sorted(rows, key=_place)))
    return {load: {name: _one(rows, load, name) for name in names} for load in loads}


def _place(row: Row) -> int:
    name = row["contestant"]
    return REFERENCES.index(name) if name in REFERENCES else len(REFERENCES)


def _one(rows: Sequence[Row], load: str, name: str) -> Row:
    own = _by_round(rows, load, name)
    found: Row = {
        key: _median([row[key] for row in own.values()])
        for key in FIGURES
        if all(row.get(key) is not None for row in own.values())
    }
    for reference in REFERENCES:
        theirs = _by_round(rows, load, reference)
        if reference != name and theirs:
            found |= _compared(own, theirs, reference)
    for key in ("by_process", "by_thread"):
        if all(key in row for row in own.values()):
            found[key] = _merged([row[key] for row in own.values()])
    return found


def _by_round(rows: Sequence[Row], load: str, name: str) -> dict[int, Row]:
    chosen = [row for row in rows if (row["load"], row["contestant"]) == (load, name)]
    return {row["round"]: row for row in chosen}


def _compared(own: dict[int, Row], theirs: dict[int, Row], reference: str) -> Row:
    """Return images/s as a share of the reference's, and what is added in CPU ms and ms."""
    pairs = [(own[number], theirs[number]) for number in own]
    found = {
        f"of_{reference}": _median([a["images_per_s"] / b["images_per_s"] for a, b in pairs]),
        f"of_{reference}_by_cores_left": _median([a[LEFT] / b[LEFT] for a, b in pairs]),
    }
    for key in ("cpu_ms", "p50_ms"):
        if all(a.get(key) and b.get(key) for a, b in pairs):
            found[f"{key}_above_{reference}"] = _median([a[key] - b[key] for a, b in pairs])
    return found


def _median(values: Sequence[float]) -> float:
    return round(median(values), 3)


def _merged(parts: Sequence[Any]) -> Any:
    """Return the medians of nested figures; what a round lacks counts as 0."""
    keys = list(dict.fromkeys(key for part in parts for key in part))
    if any(isinstance(value, dict) for part in parts for value in part.values()):
        return {key: _merged([part.get(key, {}) for part in parts]) for key in keys}
    return {key: _median([part.get(key, 0.0) for part in parts]) for key in keys}


def show(group: str, medians: dict[str, dict[str, Row]]) -> None:
    """Print the table, and what each thread takes."""
    columns = {
        "images/s": "images_per_s",
        "of bound": "of_bound",
        "of yardstick": "of_yardstick",
        "by cores left": "of_yardstick_by_cores_left",
        "of tandem": "of_tandem",
        "CPU ms": "cpu_ms",
        "+ bound": "cpu_ms_above_bound",
        "p50": "p50_ms",
        "+ bound, ms": "p50_ms_above_bound",
        "p95": "p95_ms",
        "p99": "p99_ms",
        "generator CPU ms": "generator_cpu_ms",
    }
    table = Table("load", "contestant", *columns, title=group)
    for load, of_name in medians.items():
        for name, row in of_name.items():
            table.add_row(load, name, *(_told(row.get(key)) for key in columns.values()))
        table.add_section()
    err.print(table)
    for load, of_name in medians.items():
        for name, row in of_name.items():
            for process, threads in row.get("by_thread", {}).items():
                most = ", ".join(f"{thread} {ms}" for thread, ms in threads.items() if ms >= 0.05)
                err.print(f"{load} {name} {process}: {most}")


def judged(model_set: str) -> Row:
    """Return what the set's manifest says of the fast plan's accuracy.

    Raises:
        SystemExit: the set has no fast plan.

    """
    plan = load_model_set(model_set).manifest.fast_plan
    if plan is None:
        raise SystemExit(f"{model_set} has no fast plan; tandem evaluate --plan makes one")
    return {"judged": plan.judged.model_dump(mode="json")}


def show_plans(result: Row) -> None:
    """Print the rows of docs/performance.md: images/s and CPU ms, then fast as a share of full."""
    for load, of_name in result["plans"]["median"].items():
        names = [name for name in (BOUND, YARDSTICK, TANDEM, FAST) if name in of_name]
        figures = [
            f"{of_name[name]['images_per_s']:.0f}, {of_name[name]['cpu_ms']:.1f}" for name in names
        ]
        share = f"{of_name[FAST]['of_tandem']:.2f}"
        err.print(f"| {load} clients | {' | '.join(figures)} | {share} |")


def _told(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if value < 1 else f"{value:.2f}"
