"""Renders a multi-label set's evaluation as tables for people and as JSON for scripts."""

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from calibration.evaluation.live import LiveResult
from calibration.evaluation.multi_label.evaluate import MultiLabelEvaluation
from calibration.evaluation.reports.figures_table import figures_table
from calibration.evaluation.reports.tables import (
    called,
    cell,
    gate_line,
    interval_of,
    outcome_cell,
    outcomes_by_name,
    points,
    show_differences,
    show_remarks,
)
from models.accuracy import ENSEMBLE, AccuracyRecord, MultiLabelDrop, MultiLabelScore
from models.manifest import Manifest


def as_json(
    manifest: Manifest,
    record: AccuracyRecord,
    measured: MultiLabelEvaluation,
    live: LiveResult | None,
) -> dict[str, Any]:
    """Return the evaluation for JSON, with the same figures as the tables."""
    content: dict[str, Any] = {"set": manifest.name, "task": manifest.task}
    content |= {"threshold": manifest.threshold, "max_drop": manifest.max_drop}
    content |= record.model_dump(mode="json") | {"gate": outcomes_by_name(manifest, record)}
    content["num_labels"] = measured.num_labels
    content["exact_match"] = {
        precision: {name: round(n / measured.num_images, 4) for name, n in by_name.items()}
        for precision, by_name in measured.num_exact.items()
    }
    content["notes"] = list(measured.dataset.notes)
    content["unreadable"] = measured.unreadable
    if live is not None:
        content["live"] = asdict(live) | {"is_same": live.is_same}
    return content


def show(
    console: Console,
    manifest: Manifest,
    record: AccuracyRecord,
    measured: MultiLabelEvaluation,
    live: LiveResult | None,
) -> None:
    """Print the tables."""
    console.print(_scores(record, measured))
    if record.drops:
        console.print(_drops(manifest, record))
        console.print(gate_line(manifest, record), markup=False)
    console.print(
        f"F1 and exact (all labels of an image right) at the threshold, {measured.threshold:g}; "
        "95 %: bootstrap over images; CPU ms an image at batch 8"
    )
    show_remarks(console, record, measured)
    if live is not None:
        right = ", ".join(f"{n} {v / live.num_images:.4f}" for n, v in live.num_right.items())
        console.print(f"live, {live.url}: exact {right}", markup=False)
        show_differences(console, live)


def _scores(record: AccuracyRecord, measured: MultiLabelEvaluation) -> Table:
    title = f"{record.dataset}, {record.num_images} images, {measured.num_labels} labels"
    columns = ("as", "mAP", "95 %", "micro\nF1", "95 %", "macro\nF1", "exact", "MB", "CPU\nms")
    table = figures_table("network", *columns, title=escape(title))
    for name in (*record.fingerprints, ENSEMBLE):
        for precision, scores in record.scores.items():
            score = scores.get(name)
            if not isinstance(score, MultiLabelScore):  # absent
                continue
            table.add_row(
                name,
                called(record, precision),
                f"{score.mean_average_precision:.4f}",
                _range(score.mean_average_precision_interval),
                f"{score.micro_f1:.4f}",
                _range(score.micro_f1_interval),
                f"{score.macro_f1:.4f}",
                f"{measured.num_exact[precision][name] / measured.num_images:.4f}",
                cell(record.size_mb, name, precision, 1),
                cell(record.cpu_ms_per_image, name, precision, 1),
            )
    return table


def _range(interval: tuple[float, float]) -> str:
    low, high = interval
    return f"{low:.3f}-{high:.3f}"


def _drops(manifest: Manifest, record: AccuracyRecord) -> Table:
    columns = ("points of\nmAP", "95 %", "points of\nmicro-F1", "95 %", "")
    table = figures_table("float - INT8", *columns)
    outcomes = outcomes_by_name(manifest, record)
    for name, drop in record.drops.items():
        assert isinstance(drop, MultiLabelDrop)  # of a multi-label set
        table.add_row(
            name,
            points(drop.mean_average_precision),
            interval_of(drop.mean_average_precision_interval),
            points(drop.micro_f1),
            interval_of(drop.micro_f1_interval),
            outcome_cell(manifest, outcomes[name]),
        )
    return table
