"""Renders the table of ``tandem traffic``, with a column for each version."""

from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

NOTHING = "-"
SHOWN = 3  # disagreements listed for two versions
FIGURES = {"p50 ms": "p50_ms", "p99 ms": "p99_ms", "work ms": "work_ms"} | {
    "compute ms": "compute_ms",
    "batch": "batch_size",
}
COUNTS = {"copies": "copies", "dropped": "dropped", "copies failed": "copies_failed"}


def tables(status: dict[str, Any]) -> Iterator[RenderableType]:
    """Yield the table of versions, the last disagreements, and how many Gateways have the plan."""
    versions, pairs = status["versions"], _with_main(status)
    name, _, _ = status["main"].rpartition("@")
    table = Table(escape(name), box=None, pad_edge=False)
    for version in versions:
        table.add_column(version.rpartition("@")[2], justify="right", no_wrap=True)
    for title, cells in _rows(status):
        table.add_row(title, *cells)
    yield table
    for version, pair in pairs.items():
        for of in pair["disagreements"][-SHOWN:]:
            first, second = of["labels"]
            yield escape(
                f"request {of['request_id']}, file {of['file']}: {first}; by "
                f"{version.rpartition('@')[2]}: {second}"
            )
    if not pairs:
        yield "no photo has been answered by two versions yet"
    num, current = status["num_gateways"], status["num_current"]
    gateways = "Gateway" if num == 1 else "Gateways"
    yield (
        f"revision {status['revision']}, served by {current} of {num} {gateways}; "
        f"{len(status['earlier'])} to roll back to"
    )


def _rows(status: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    versions = list(status["versions"].values())
    yield "share", ["shadow" if of["is_shadow"] else f"{of['share']:g} %" for of in versions]
    yield "answered", [str(of["answered"]) for of in versions]
    yield "failed", [f"[red]{of['failed']}[/]" if of["failed"] else "0" for of in versions]
    for title, field in FIGURES.items():
        yield title, [_number(of.get(field), 1) for of in versions]
    for title, field in COUNTS.items():
        yield title, [str(of[field]) for of in versions]
    pairs = _with_main(status)
    compared = [pairs.get(name, {}) for name in status["versions"]]
    yield f"compared with {status['main'].rpartition('@')[2]}", [""] * len(versions)
    yield "  photos", [str(pair.get("compared", NOTHING)) for pair in compared]
    yield "  agree", [_percent(pair.get("agreement")) for pair in compared]
    yield "    95 %", [_bounds(pair.get("agreement_interval"), _percent) for pair in compared]
    yield "  total variation", [_number(pair.get("total_variation"), 3) for pair in compared]
    yield "    95 %", [_bounds(pair.get("total_variation_interval"), _number) for pair in compared]


def _with_main(status: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the comparisons with the main version, by the other version."""
    pairs = status["comparisons"]
    return {pair["version"]: pair for pair in pairs if pair["reference"] == status["main"]}


def _number(value: float | None, digits: int = 3) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1%}"


def _bounds(interval: list[float] | None, shown: Any) -> str:
    return NOTHING if interval is None else "-".join(map(shown, interval))


def settings_of(status: dict[str, Any]) -> str:
    """Return, as YAML, the settings that keep a plan after a restart."""
    shares = ", ".join(f"{name}: {share:g}" for name, share in status["shares"].items())
    lines = [f"traffic: {{{shares}}}"]
    if (shadow := status.get("shadow")) is not None:
        lines.append(f"shadow: {shadow}")
    return "\n".join(lines)
