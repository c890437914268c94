"""An evaluation as tables for people, as JSON for scripts, and as a record in the manifest."""

import platform
import tempfile
from contextlib import suppress
from dataclasses import asdict
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from calibration.evaluation.evaluate import Evaluation, MultiLabelEvaluation
from calibration.evaluation.live import LiveResult
from calibration.evaluation.plans import MAX_LOST, PlanSearch
from calibration.sets.transaction import change, write_manifest, writing
from calibration.statistics import ModeTally
from models.errors import ModelSetError
from models.image_colors import offline_profiles
from models.ledger import (
    SIGNIFICANCE,
    DropOutcome,
    bound,
    current_records,
    judged,
    outcome_of,
    refused,
)
from models.machine import cpu_model
from models.manifest import ENSEMBLE, MANIFEST_NAME, Manifest, read_manifest
from models.model_set import ModelSet
from models.record import AccuracyRecord, Drop, FileRecord, MultiLabelScore, Precision, Score

MAX_LISTED = 10
AnyEvaluation = Evaluation | MultiLabelEvaluation
COLUMNS = ("top-1", "95 %", "top-5", "ECE")
MULTI_LABEL_COLUMNS = ("mAP", "95 %", "micro\nF1", "95 %", "macro\nF1", "exact")
PACKAGES = ("openvino", "onnxruntime", "torch", "nncf", "numpy", "opencv-python-headless")
RECORD_BYTES = 64 * 1024  # the most that a record of eight members adds to the manifest


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


class OutdatedRecordError(ModelSetError):
    """The set is not the one that was measured any more."""


def record_of(model_set: ModelSet, measured: Evaluation | MultiLabelEvaluation) -> AccuracyRecord:
    """Return the evaluation as a record, with the fingerprints of its networks."""
    scores = measured.scores
    precisions = tuple(scores)
    fingerprints: dict[str, dict[Precision, str]] = {}
    for m in model_set.manifest.members:
        own = [p for p in map(m.precision_of, precisions) if p in m.networks]
        fingerprints[m.name] = {p: m.networks[p].fingerprint for p in own}
    return AccuracyRecord(
        dataset=measured.dataset.name,
        images_sha256=measured.images_sha256,
        num_images=measured.num_images,
        measured=date.today(),
        cpu=cpu_model(),
        int8_kernels=measured.int8_kernels,
        float_type=measured.float_type,
        versions=_versions(),
        fingerprints=fingerprints,
        conditions=model_set.manifest.conditions,
        icc_profiles=offline_profiles(),
        scores=scores,
        drops=measured.lost,
        size_mb=sizes_mb(model_set, precisions),
        cpu_ms_per_image=measured.cpu_ms_per_image,
    )


def sizes_mb(
    model_set: ModelSet, precisions: tuple[Precision, ...]
) -> dict[str, dict[Precision, float]]:
    """Return the size of each network's files, in 10**6 bytes, by requested precision."""

    def size_of(file: FileRecord) -> int:
        return (model_set.folder / file.path).stat().st_size

    return {
        member.name: {
            p: round(sum(map(size_of, member.network(p).files)) / 1e6, 2)
            for p in precisions
            if member.precision_of(p) in member.networks
        }
        for member in model_set.manifest.members
    }


def check_can_keep(folder: Path, made_by: str | None = None) -> None:
    """Check before minutes of measuring that the record can be written.

    Raises:
        ModelSetError: another command changes the set, or its folder is not writable or full.
    """
    with change(folder, made_by) as staging:
        room = (folder / MANIFEST_NAME).stat().st_size + RECORD_BYTES
        staging.text("room", "\n" * room)


def keep(folder: Path, record: AccuracyRecord) -> None:
    """Write the record into the set's manifest, in one step.

    Raises:
        OutdatedRecordError: the set has changed since it was measured.
        ModelSetError: another command changes the set, or its folder is not writable or full.
    """
    with change(folder):
        manifest = with_record(read_manifest(folder), record)  # the present one
        if record not in current_records(manifest):
            raise OutdatedRecordError(
                f"the networks of {folder}, or their labels, weights or image rule, were changed "
                "while they were measured: nothing is recorded; evaluate them again"
            )
        with writing(folder):
            write_manifest(folder, manifest)


def kept_aside(record: AccuracyRecord) -> str:
    """Save a record that could not be added to the set; return where, or its text if that fails."""
    text = yaml.safe_dump([record.model_dump(mode="json", exclude_none=True)], sort_keys=False)
    how = "add it to the list accuracy of the set's manifest.yaml"
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="tandem-accuracy-", suffix=".yaml", delete=False, encoding="utf-8"
        ) as opened:
            opened.write(text)
    except OSError:  # perhaps the full disk is this one
        return f"This is the record; {how}:\n{text}"
    return f"The record is in {opened.name}: {how}"


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def with_record(manifest: Manifest, record: AccuracyRecord) -> Manifest:
    """Add a record; remove stale ones and those of the same images and conditions.

    A record that may refuse the present INT8 networks stays, whatever the conditions and
    ``max_drop``, until the same images are evaluated again under its conditions.
    """
    current, strictest = current_records(manifest), manifest.model_copy(update={"max_drop": 0.0})

    def stays(old: AccuracyRecord) -> bool:
        is_same = _measured(old) == _measured(record)
        if names := {judgement.name for judgement in refused(strictest, old)}:
            return not (is_same and names <= set(record.drops))
        return old in current and not is_same

    kept = tuple(old for old in manifest.accuracy if stays(old))
    return manifest.model_copy(update={"accuracy": (*kept, record)})


def _measured(record: AccuracyRecord) -> tuple[object, ...]:
    return record.images_sha256, record.conditions, record.icc_profiles
