"""Renders an evaluation as tables for people and as JSON for scripts."""

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from calibration.evaluation.evaluate import Evaluation
from calibration.evaluation.live import LiveResult
from calibration.evaluation.multi_label import MultiLabelEvaluation
from calibration.evaluation.report_plans import (
    figures_table,
    interval_of,
    points,
    range_of,
    show_modes,
)
from models.accuracy import AccuracyRecord, Drop, MultiLabelScore, Score
from models.ledger import SIGNIFICANCE, DropOutcome, bound, judged, outcome_of
from models.manifest import ENSEMBLE, Manifest
from models.record import Precision

MAX_LISTED = 10
AnyEvaluation = Evaluation | MultiLabelEvaluation
COLUMNS = ("top-1", "95 %", "top-5", "ECE")
MULTI_LABEL_COLUMNS = ("mAP", "95 %", "micro\nF1", "95 %", "macro\nF1", "exact")


def as_json(
    manifest: Manifest, record: AccuracyRecord, measured: AnyEvaluation, live: LiveResult | None
) -> dict[str, Any]:
    """Return the evaluation for JSON, with the same figures as the tables."""
    content: dict[str, Any] = {"set": manifest.name}
    if manifest.is_multi_label:
        content |= {"task": manifest.task, "threshold": manifest.threshold}
    content["max_drop"] = manifest.max_drop
    content |= record.model_dump(mode="json") | {"gate": outcomes_by_name(manifest, record)}
    if isinstance(measured, MultiLabelEvaluation):
        content["num_labels"] = measured.num_labels
        content["exact_match"] = {
            precision: {name: round(n / measured.num_images, 4) for name, n in by_name.items()}
            for precision, by_name in measured.num_exact.items()
        }
    content["notes"] = list(measured.dataset.notes)
    content["unreadable"] = measured.unreadable
    if isinstance(measured, Evaluation):
        content |= _comparisons(measured)
    if live is not None:
        content["live"] = asdict(live) | {"is_same": live.is_same}
    return content


def _comparisons(measured: Evaluation) -> dict[str, Any]:
    agreed = {p: round(n / measured.num_images, 4) for p, n in measured.num_agreed.items()}
    content: dict[str, Any] = {"agreement": agreed}
    if measured.modes:
        content["modes"] = {
            precision: {name: tally.figures() for name, tally in modes.tallies.items()}
            for precision, modes in measured.modes.items()
        }
    content["ensemble_over_members"] = over = dict[str, dict[str, Any]]()
    for precision, pairs in measured.over_members.items():
        over[precision] = {
            name: {
                "difference": round(pair.difference, 4),
                "interval": [round(v, 4) for v in pair.interval],
                "p_value": round(pair.p_value, 4),
            }
            for name, pair in pairs.items()
        }
    return content


def show(
    console: Console,
    manifest: Manifest,
    record: AccuracyRecord,
    measured: AnyEvaluation,
    live: LiveResult | None,
) -> None:
    """Print the tables."""
    console.print(_scores(record, measured))
    if record.drops:
        console.print(_drops(manifest, record))
        console.print(gate_line(manifest, record), markup=False)
    if isinstance(measured, Evaluation):
        _show_comparisons(console, measured)
        console.print("95 %: Wilson intervals; ECE: calibration error; CPU ms an image at batch 8")
    else:
        console.print(
            f"F1 and exact (all labels of an image right) at the threshold, {measured.threshold:g};"
            " 95 %: bootstrap over images; CPU ms an image at batch 8"
        )
    show_remarks(console, record, measured)
    if live is None:
        return
    names = (ENSEMBLE,) if live.num_partial else live.num_right
    right = ", ".join(f"{n} {live.num_right[n] / live.num_images:.4f}" for n in names)
    figure = "exact" if manifest.is_multi_label else "top-1"
    console.print(f"live, {live.url}: {figure} {right}", markup=False)
    if live.num_alone:
        alone = live.num_alone / live.num_images
        console.print(f"  its fast plan skipped members on {alone:.1%} of images")
    show_differences(console, live)


def _show_comparisons(console: Console, measured: Evaluation) -> None:
    for precision, pairs in measured.over_members.items():
        gains = ", ".join(
            f"{name} {points(pair.difference)} ({interval_of(pair.interval)})"
            for name, pair in pairs.items()
        )
        agreed = measured.num_agreed[precision] / measured.num_images
        console.print(
            f"{precision}: the ensemble over {gains}; all members agree on {agreed:.1%} of images"
        )
    for precision, modes in list(measured.modes.items())[-1:]:  # INT8, which the bounds are of
        show_modes(console, precision, modes.tallies)


def show_remarks(console: Console, record: AccuracyRecord, measured: AnyEvaluation) -> None:
    """Print the CPU, the notes, and the first images that could not be read."""
    console.print(f"{record.cpu}; INT8 kernels: {record.int8_kernels or 'none'}", markup=False)
    for note in measured.dataset.notes:
        console.print(note, style="yellow", markup=False)
    if unreadable := measured.unreadable:
        console.print(f"[yellow]{len(unreadable)} images cannot be read, left out:[/]")
        for line in unreadable[:MAX_LISTED]:
            print_line(console, line)
        if len(unreadable) > MAX_LISTED:
            console.print("  ... (--json has all)", markup=False)


def _scores(record: AccuracyRecord, measured: AnyEvaluation) -> Table:
    title = f"{record.dataset}, {record.num_images} images"
    own: tuple[str, ...] = COLUMNS
    if isinstance(measured, MultiLabelEvaluation):
        title, own = f"{title}, {measured.num_labels} labels", MULTI_LABEL_COLUMNS
    table = figures_table("network", "as", *own, "MB", "CPU\nms", title=escape(title))
    for name in (*record.fingerprints, ENSEMBLE):
        for precision, scores in record.scores.items():
            if (score := scores.get(name)) is None:
                continue
            cells = [called(record, precision), *_cells(score)]
            if isinstance(measured, MultiLabelEvaluation):
                cells.append(f"{measured.num_exact[precision][name] / measured.num_images:.4f}")
            cells += (cell(of, name, precision) for of in (record.size_mb, record.cpu_ms_per_image))
            table.add_row(name, *cells)
    return table


def _cells(score: Score | MultiLabelScore) -> tuple[str, ...]:
    if isinstance(score, Score):
        ends, error = range_of(score.top1_interval), f"{score.calibration_error:.3f}"
        return f"{score.top1:.4f}", ends, f"{score.top5:.4f}", error
    return (
        f"{score.mean_average_precision:.4f}",
        range_of(score.mean_average_precision_interval),
        f"{score.micro_f1:.4f}",
        range_of(score.micro_f1_interval),
        f"{score.macro_f1:.4f}",
    )


def called(record: AccuracyRecord, precision: Precision) -> str:
    """Return a precision's name for people."""
    return record.float_type.get(precision, "float") if precision == "FP16" else precision


def cell(table: dict[str, dict[Precision, float]], name: str, precision: Precision) -> str:
    """Return a network's figure; for the ensemble the sum of its members'."""
    rows = table.values() if name == ENSEMBLE else [table[name]]
    return f"{sum(by[precision] for by in rows if precision in by):.1f}"


def _drops(manifest: Manifest, record: AccuracyRecord) -> Table:
    columns = ["points of\ntop-1", "95 %", "McNemar p"]
    if manifest.is_multi_label:
        columns = ["points of\nmAP", "95 %", "points of\nmicro-F1", "95 %"]
    table = figures_table("float - INT8", *columns, "")
    outcomes = outcomes_by_name(manifest, record)
    for name, drop in record.drops.items():
        if isinstance(drop, Drop):
            cells = [points(drop.top1), interval_of(drop.interval), f"{drop.p_value:.3f}"]
        else:
            low_to_high = interval_of(drop.mean_average_precision_interval)
            cells = [points(drop.mean_average_precision), low_to_high]
            cells += [points(drop.micro_f1), interval_of(drop.micro_f1_interval)]
        table.add_row(name, *cells, outcome_cell(manifest, outcomes[name]))
    return table


def outcomes_by_name(manifest: Manifest, record: AccuracyRecord) -> dict[str, DropOutcome]:
    """Return the accuracy gate's outcome for each classifier."""
    judgements = judged(record.drops, record.num_images, manifest.max_drop)
    return {name: outcome_of([j for j in judgements if j.name == name]) for name in record.drops}


def outcome_cell(manifest: Manifest, outcome: DropOutcome) -> str:
    """Return an outcome of the accuracy gate in words and colour."""
    if outcome == "refused":
        return f"[red]refused: over {points(manifest.max_drop)}[/]"
    return "[green]verified[/]" if outcome == "verified" else "[yellow]not known[/]"


def gate_line(manifest: Manifest, record: AccuracyRecord) -> str:
    """Return the rule of the accuracy gate with this evaluation's numbers."""
    limit, end = manifest.max_drop, bound(manifest.max_drop, record.num_images)
    num_figures = sum(len(drop.losses) for drop in record.drops.values())
    return (
        f"refused: a loss over {points(limit)} that is no chance (p times {num_figures} at most "
        f"{SIGNIFICANCE}); verified: one up to {points(limit)} whose interval ends at "
        f"{points(end)} or below; else more images are needed"
    )


def show_differences(console: Console, live: LiveResult) -> None:
    """Print how many live answers equal those in process, and the first that differ."""
    same = f"{live.num_same} of {live.num_images} images answered as in process"
    color = "green" if live.is_same else "red"
    console.print(
        f"  [{color}]{same}[/]; probabilities differ by at most {live.max_difference:.5f}"
    )
    for line in live.differences[:MAX_LISTED]:
        print_line(console, line)


def print_line(console: Console, line: str) -> None:
    """Print a line with a file's name unchanged; the name need not be UTF-8."""
    console.print(f"  {line}".encode("utf-8", "replace").decode(), markup=False)
