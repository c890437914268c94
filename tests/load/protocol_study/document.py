"""Writes docs/protocols.md and its plots from the figures of the study."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import machine  # noqa: F401 (makes tests.support importable)

from protocol_study.claims import verdicts
from protocol_study.figures import Figures, Row
from protocol_study.plots import write_plots
from tests.support.wrapped import wrapped

TEMPLATE = "protocols.md.j2"
OVERHEAD = Path(__file__).parent.parent / "results" / "overhead-vnni.json"
NOT_TOLD = "-"


def write_document(result: Mapping[str, Any], path: Path) -> None:
    """Write the document to ``path`` and the plots to a folder beside it, named like it."""
    figures = Figures(result, json.loads(OVERHEAD.read_text("utf-8")))
    plots = path.with_suffix("")
    plots.mkdir(parents=True, exist_ok=True)
    names = write_plots(figures, plots)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        autoescape=False,
    )
    text = environment.get_template(TEMPLATE).render(
        result=result,
        figures=figures,
        folder=plots.name,
        plots=names,
        verdicts=verdicts(figures),
        table=table,
        loads=loads,
        batches=batches,
        connections=connections,
        arrivals=arrivals,
        serialisers=serialisers,
        rate=lambda *way: rate(figures, *way),
        cost=lambda *way: number(figures.at_clients(*way, 16), "server_cpu_ms"),
    )
    path.write_text(wrapped(text.strip() + "\n"), "utf-8")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; all columns but the first are numbers."""
    lines = [f"| {' | '.join(head)} |", "| --- |" + " ---: |" * (len(head) - 1)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def number(row: Row, name: str, digits: int = 1) -> str:
    """Return a figure, or a dash where there is none."""
    value = row.get(name)
    return NOT_TOLD if value is None else f"{value:,.{digits}f}"


def rate(figures: Figures, protocol: str, payload: str, batch: int) -> str:
    """Return images/s of one client that sends so many images in a request."""
    row = figures.one("batch", protocol=protocol, payload=payload, batch=batch)
    return number(row, "images_per_s", 0)


def loads(figures: Figures, clients: int) -> str:
    """Return the table of single images from so many clients."""
    head = "way,images/s,p50 ms,p95 ms,p99 ms,CPU-ms service,CPU-ms client,utilisation %,memory MB"
    rows = []
    for row in figures.of("clients", clients=clients):
        mean, deviation = (number(row, f"utilisation_{of}", 0) for of in ("percent", "deviation"))
        busy = f"{mean} ± {deviation}"
        latencies = [number(row, f"p{q}_ms") for q in (50, 95, 99)]
        costs = [number(row, "server_cpu_ms", 2), number(row, "client_cpu_ms", 2)]
        memory = number(row, "memory_mb", 0)
        rows.append([way(row), number(row, "images_per_s"), *latencies, *costs, busy, memory])
    return table(head.split(","), rows)


def way(row: Row) -> str:
    return f"{row['protocol']}, {row['payload']}"


def batches(figures: Figures) -> str:
    """Return the table of images/s by the images in a request, one client."""
    sizes = sorted({row["batch"] for row in figures.of("batch")})
    rows = []
    for protocol, payload in figures.ways("batch"):
        each = {r["batch"]: r for r in figures.of("batch", protocol=protocol, payload=payload)}
        cells = [
            NOT_TOLD
            if size not in each
            else "refused"
            if "refused" in each[size]
            else number(each[size], "images_per_s")
            for size in sizes
        ]
        rows.append([f"{protocol}, {payload}", *cells])
    return table(["images/s, one client", *(f"{size}" for size in sizes)], rows)


def connections(figures: Figures) -> str:
    """Return the table of connections kept and new."""
    rows = []
    for row in figures.of("connections", clients=1):
        name = {"protocol": row["protocol"], "payload": row["payload"]}
        kept_one, kept_many = (figures.one("clients", clients=n, **name) for n in (1, 16))
        many = figures.one("connections", clients=16, **name)
        cells = [number(kept_one, "p50_ms"), number(row, "p50_ms")]
        rows.append(
            [way(row), *cells, number(kept_many, "images_per_s"), number(many, "images_per_s")]
        )
    head = "way,p50 ms kept,p50 ms new,images/s kept (16 clients),images/s new"
    return table(head.split(","), rows)


def arrivals(figures: Figures) -> str:
    """Return the table of Poisson arrivals: p50 and p99 at each share of the capacity."""
    shares = sorted({row["share"] for row in figures.of("arrivals")})
    rows = []
    for protocol, payload in figures.ways("arrivals"):
        each = {r["share"]: r for r in figures.of("arrivals", protocol=protocol, payload=payload)}
        cells = [f"{number(each[s], 'p50_ms')} / {number(each[s], 'p99_ms', 0)}" for s in shares]
        rows.append([f"{protocol}, {payload}", *cells])
    return table(["p50 / p99 ms at", *(f"{share:.0%}" for share in shares)], rows)


def serialisers(figures: Figures) -> str:
    """Return the table of formats."""
    rows = [
        [
            f"{row['format']}, {row['dtype']}, {row['batch']}",
            number(row, "bytes", 0),
            number(row, "write_ms", 3),
            number(row, "read_ms", 3),
        ]
        for row in figures.result["serialisers"]
    ]
    return table(["format, dtype, images", "bytes", "write CPU-ms", "read CPU-ms"], rows)
