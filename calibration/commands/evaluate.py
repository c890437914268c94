"""``tandem evaluate``: measures a set on labelled images, and keeps its accuracy record.

With ``--calibrate``, ``--sure-at`` or ``--plan`` it fits temperatures, chooses when an answer is
sure, or searches the fast plan instead (:mod:`calibration.commands.fit`).
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import typer
from rich.markup import escape

from calibration.commands.evaluate_options import (
    EvaluateOptions,
    Tracker,
    progress_bar,
    sampled,
)
from calibration.commands.fit import fit, measure_foreign
from calibration.commands.models import check_file, err, out
from calibration.datasets import read_dataset, read_label_sets
from calibration.evaluation.evaluate import (
    Evaluation,
    MultiLabelEvaluation,
    evaluate_label_sets,
    evaluate_set,
)
from calibration.evaluation.live import LiveResult, LiveService, MultiLabelLiveService
from calibration.evaluation.report import (
    OutdatedRecordError,
    as_json,
    check_can_keep,
    keep,
    kept_aside,
    record_of,
    show,
)
from models.errors import ModelSetError
from models.files import check_can_write, write_json
from models.ledger import judge, judged, outcome_of
from models.machine import needs_extra
from models.manifest import read_manifest
from models.model_set import ModelSet, load_model_set, search_path
from models.record import AccuracyRecord, Precision
from models.stores import is_fetched

PRECISIONS: tuple[Precision, ...] = ("FP16", "INT8")  # the float ones first


@dataclass(frozen=True)
class EvaluatedSet:
    """The result of a run, for printing."""

    model_set: ModelSet
    record: AccuracyRecord
    measured: Evaluation | MultiLabelEvaluation
    live: LiveResult | None


def evaluate(options: EvaluateOptions) -> None:
    """Measure every member and the ensemble, float and INT8, on labelled images.

    Top-1 and more; of a multi-label set mean average precision, micro and macro F1.

    Exit code 1: INT8 lost more than the set's max_drop, or the live service answered otherwise.
    """
    if options.subsets:
        raise ModelSetError(
            "--subsets is an option no more: --plan compares the members' ensembles, and writes "
            "the one that is worth it as the set's fast plan"
        )
    check_can_write(options.json_file)
    check_file(options.html, "--html")
    check_file(options.plot, "--plot")
    _check_drawn(options)
    model_set = load_model_set(options.name, search_path(options.model_dir or ()))
    if model_set.manifest.task == "multi_label" and options.html is not None:
        raise ModelSetError(
            "--html: of classes that exclude each other, and this set is multi-label; leave it out "
            "(--json has all figures)"
        )
    if options.fitting:
        fit(model_set, options)
        return
    if options.wrong_weight is not None:
        raise ModelSetError("--wrong-weight is of --calibrate and --sure-at: give it with one")
    if options.foreign is not None:
        measure_foreign(model_set, options)
    elif not _is_well_evaluated(model_set, options):
        raise typer.Exit(1)


def _check_drawn(options: EvaluateOptions) -> None:
    if options.html is None and options.plot is None:
        return
    with needs_extra("calibrate", "evaluate --html and --plot"):
        from calibration.evaluation.report_page import SUFFIXES

    if options.plot is not None:
        if not options.plan:
            raise ModelSetError("--plot draws what --plan compares: give both")
        if options.plot.suffix.lower() not in SUFFIXES:
            raise ModelSetError(f"--plot {options.plot}: give a name that ends in .svg or .png")


def _is_well_evaluated(model_set: ModelSet, options: EvaluateOptions) -> bool:
    is_recorded = options.record and not (options.max_images or options.url is not None)
    if is_recorded and is_fetched(model_set.folder):
        is_recorded = False
        err.print("the set comes from a store, so the result is not recorded in its manifest")
    if is_recorded:
        check_can_keep(model_set.folder)
    evaluated = _measured(model_set, options)
    problem: ModelSetError | None = None
    if is_recorded:
        try:
            keep(model_set.folder, evaluated.record)
            err.print(f"recorded in {escape(str(model_set.folder))}/manifest.yaml")
        except OutdatedRecordError as error:
            problem = error
        except ModelSetError as error:
            problem = ModelSetError(f"{error.message}. {kept_aside(evaluated.record)}")
    _report(evaluated, options)
    if problem is not None:
        raise problem  # first what was measured, then why it is not kept
    return _is_well(evaluated) and not (is_recorded and _is_refused(model_set.folder))


def _measured(model_set: ModelSet, options: EvaluateOptions) -> EvaluatedSet:
    """Measure every precision, or that of the running service together with its answers."""
    measure: Callable[..., Evaluation | MultiLabelEvaluation]
    kind = MultiLabelLiveService if model_set.manifest.is_multi_label else LiveService
    if model_set.manifest.is_multi_label:
        label_sets = read_label_sets(options.labelled, model_set, options.ids_of(model_set))
        label_sets = sampled(label_sets, options.max_images)
        measure = partial(evaluate_label_sets, model_set, label_sets)
    else:
        dataset = read_dataset(options.labelled, model_set, options.ids_of(model_set))
        dataset = sampled(dataset, options.max_images)
        measure = partial(evaluate_set, model_set, dataset)
    there = {p for member in model_set.manifest.members for p in member.networks}
    url = options.url
    live = nullcontext() if url is None else kind(url, model_set, options.key_file)
    with live as service, progress_bar() as progress:
        every = tuple(p for p in PRECISIONS if p in there)
        precisions = (service.precision,) if service else every
        measured = measure(
            precisions,
            track=Tracker(progress, f"{model_set.name} {' and '.join(precisions)}"),
            observe=service.observe if service else None,
        )
    record = record_of(model_set, measured)
    return EvaluatedSet(model_set, record, measured, service.result if service else None)


def _is_well(evaluated: EvaluatedSet) -> bool:
    record, limit = evaluated.record, evaluated.model_set.manifest.max_drop
    is_over = outcome_of(judged(record.drops, record.num_images, limit)) == "refused"
    if is_over:
        err.print("[red]INT8 lost more than max_drop; tandem serve will refuse this set[/]")
    is_other = evaluated.live is not None and not evaluated.live.is_same
    if is_other:
        err.print("[red]the live service does not answer as the networks in this process[/]")
    return not (is_over or is_other)


def _is_refused(folder: Path) -> bool:
    """Whether the set is over its limit all the same, by other images than these."""
    manifest = read_manifest(folder)
    verdict = judge(manifest, argument=ModelSet(folder, manifest).argument)
    if verdict.status == "dropped":
        err.print(f"[red]not by these images, but by others:[/] {escape(verdict.message)}")
    elif verdict.status == "unknown":
        err.print(f"[yellow]{escape(verdict.message)}[/]")
    return verdict.status == "dropped"


def _report(evaluated: EvaluatedSet, options: EvaluateOptions) -> None:
    measured = evaluated.measured
    facts = (evaluated.model_set.manifest, evaluated.record, measured, evaluated.live)
    content = as_json(*facts)
    if options.has_tables:
        show(out, *facts)
    write_json(options.json_file, content)
    if options.html is not None and isinstance(measured, Evaluation):
        from calibration.evaluation.report_page import write_page

        write_page(options.html, evaluated.model_set, content, measured)
        err.print(f"the page: {escape(str(options.html))}")
