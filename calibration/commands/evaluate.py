"""``tandem evaluate``: measures a set's accuracy, keeps the accuracy record, writes the reports."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from calibration.commands.calibrate import (
    EvaluateOptions,
    calibrate,
    check_calibrate_options,
    check_multi_label,
    check_plot_options,
    choose_sure,
    command_of,
)
from calibration.commands.models import JsonFile, ModelDirs, SetName, check_file, err, out
from calibration.datasets import Dataset, LabelSets, read_dataset, read_label_sets
from calibration.evaluation.evaluate import Evaluation, evaluate_set
from calibration.evaluation.live import LiveResult, LiveService, MultiLabelLiveService
from calibration.evaluation.multi_label import MultiLabelEvaluation, evaluate_label_sets
from calibration.evaluation.record import (
    OutdatedRecordError,
    check_can_keep,
    keep,
    kept_aside,
    record_of,
)
from calibration.evaluation.report import as_json, show
from calibration.evaluation.report import multi_label_json as label_sets_json
from calibration.evaluation.report import show_multi_label as show_label_sets
from calibration.evaluation.subsets import SubsetStudy, measure_costs, subsets_of
from models.errors import ModelSetError
from models.files import check_can_write, write_json
from models.ledger import judge, judged, outcome_of
from models.machine import needs_extra
from models.manifest import AccuracyRecord, read_manifest
from models.model_set import ModelSet, load_model_set, search_path
from models.record import Precision
from models.stores import is_fetched

Images = Annotated[
    Path,
    typer.Option(
        help="ImageFolder (DIR/<class>/<file>), or a CSV of file,label; of a multi-label set "
        "file,label;label"
    ),
]
Url = Annotated[
    str | None,
    typer.Option(help="also through this running service; it must answer as in process"),
]
KeyFile = Annotated[
    Path | None,
    typer.Option(help="holds that service's key, if it wants one  (default: TANDEM_API_KEY)"),
]
Subsets = Annotated[
    bool,
    typer.Option("--subsets", help="compare every ensemble of the members: accuracy against cost"),
]
Plot = Annotated[Path | None, typer.Option(help="with --subsets: draw them, FILE.svg or FILE.png")]
Calibrate = Annotated[
    bool,
    typer.Option(
        "--calibrate",
        help="fit a temperature for each member and one for the average on half of the images, "
        "judge on the others, and write them into the manifest",
    ),
]
SureAt = Annotated[
    float | None,
    typer.Option(
        min=0.01,
        max=0.999,
        help="choose from which probability on half of the images show that this share of answers "
        "is right, judge on the others, and write it into the manifest",
    ),
]
MaxImages = Annotated[
    int,
    typer.Option(
        min=0, show_default=False, help="a random sample this large, not recorded  (default: all)"
    ),
]
RecordOption = Annotated[
    bool, typer.Option(help="keep the result in the set's manifest, where serve reads it")
]
Html = Annotated[Path | None, typer.Option(help="write a page with plots")]


def evaluate(
    name: SetName,
    images: Images,
    url: Url = None,
    subsets: Subsets = False,
    plot: Plot = None,
    calibrate: Calibrate = False,
    sure_at: SureAt = None,
    max_images: MaxImages = 0,
    record: RecordOption = True,
    json_file: JsonFile = None,
    html: Html = None,
    model_dir: ModelDirs = None,
    key_file: KeyFile = None,
) -> None:
    """Measure every member and the ensemble, float and INT8, on labelled images.

    Top-1 and more; of a multi-label set mean average precision, micro and macro F1.

    Exit code 1: INT8 lost more than the set's max_drop, or the live service answered otherwise.
    """
    with needs_extra("calibrate", "evaluate"):
        from calibration.commands.calibrate import EvaluateOptions
    options = EvaluateOptions(
        images=images,
        url=url,
        max_images=max_images,
        is_recorded=record,
        json_file=json_file,
        html=html,
        model_dirs=tuple(model_dir or ()),
        key_file=key_file,
        has_subsets=subsets,
        plot=plot,
        is_calibrated=calibrate,
        sure_at=sure_at,
    )
    if not run_evaluation(name, options):
        raise typer.Exit(1)


T = TypeVar("T")
D = TypeVar("D", Dataset, LabelSets)


@dataclass(frozen=True)
class EvaluatedSet:
    """The result of a run, for printing."""

    model_set: ModelSet
    record: AccuracyRecord
    measured: Evaluation | MultiLabelEvaluation
    live: LiveResult | None


def run_evaluation(name: str, options: EvaluateOptions) -> bool:
    """Return whether INT8 lost no more than it may and the live service answered the same."""
    check_can_write(options.json_file)
    check_file(options.html, "--html")
    check_file(options.plot, "--plot")
    if options.plot is not None:
        check_plot_options(options)
    model_set = load_model_set(name, search_path(options.model_dirs))
    is_multi_label = model_set.manifest.task == "multi_label"
    if is_multi_label:
        check_multi_label(options)
    if options.is_calibrated or options.sure_at is not None:
        _calibrate(model_set, options)
        return True
    is_recorded = options.is_recorded and not (options.max_images or options.url is not None)
    if is_recorded and is_fetched(model_set.folder):
        is_recorded = False
        err.print("the set comes from a store, so the result is not recorded in its manifest")
    if is_recorded:
        check_can_keep(model_set.folder)
    evaluated = (_measured_label_sets if is_multi_label else _measured)(model_set, options)
    problem = _keep(model_set.folder, evaluated.record) if is_recorded else None
    _report(evaluated, options)
    if problem is not None:
        raise problem  # first what was found, then why it is not kept
    return _is_well(evaluated) and not (is_recorded and _is_refused(model_set.folder))


def _calibrate(model_set: ModelSet, options: EvaluateOptions) -> None:
    check_calibrate_options(options, model_set)
    if options.max_images and options.is_recorded:
        options = replace(options, is_recorded=False)
        err.print("--max-images: a sample's result is shown, and not written into the manifest")
    if options.is_recorded:
        check_can_keep(model_set.folder, command_of(options))
    dataset = _sampled(read_dataset(options.images, model_set), options.max_images)
    *_, precision = _whole_precisions(model_set)
    with _progress() as progress:
        track = _Tracker(progress, f"{model_set.name} {precision}")
        fit = calibrate if options.is_calibrated else choose_sure
        fit(model_set, dataset, precision, options, track)


def _measured(model_set: ModelSet, options: EvaluateOptions) -> EvaluatedSet:
    dataset = _sampled(read_dataset(options.images, model_set), options.max_images)
    with _service(options, model_set) as service, _progress() as progress:
        precisions = (service.precision,) if service else _precisions(model_set)
        study = _study(model_set, precisions) if options.has_subsets else None
        measured = evaluate_set(
            model_set,
            dataset,
            precisions,
            track=_Tracker(progress, f"{model_set.name} {' and '.join(precisions)}"),
            observe=service.observe if service else None,
            study=study,
        )
    record = record_of(model_set, measured)
    return EvaluatedSet(model_set, record, measured, service.result if service else None)


def _measured_label_sets(model_set: ModelSet, options: EvaluateOptions) -> EvaluatedSet:
    dataset = _sampled(read_label_sets(options.images, model_set), options.max_images)
    with _service(options, model_set) as service, _progress() as progress:
        precisions = (service.precision,) if service else _precisions(model_set)
        measured = evaluate_label_sets(
            model_set,
            dataset,
            precisions,
            track=_Tracker(progress, f"{model_set.name} {' and '.join(precisions)}"),
            observe=service.observe if service else None,
        )
    record = record_of(model_set, measured)
    return EvaluatedSet(model_set, record, measured, service.result if service else None)


def _keep(folder: Path, record: AccuracyRecord) -> ModelSetError | None:
    """Put the record into the set; return what was against it."""
    try:
        keep(folder, record)
        err.print(f"recorded in {escape(str(folder))}/manifest.yaml")
    except OutdatedRecordError as error:
        return error
    except ModelSetError as error:
        return ModelSetError(f"{error.message}. {kept_aside(record)}")
    return None


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


class _Tracker:
    """Advances a progress bar by the images of each batch that is handed out."""

    def __init__(self, progress: Progress, what: str) -> None:
        self._progress, self._what = progress, what

    def __call__(self, batches: Iterable[Sequence[T]], total: int) -> Iterator[Sequence[T]]:
        task = self._progress.add_task(self._what, total=total)
        for batch in batches:
            yield batch
            self._progress.advance(task, len(batch))


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(
        *columns, TimeRemainingColumn(), console=err, transient=True, disable=not err.is_terminal
    )


def _service(
    options: EvaluateOptions, model_set: ModelSet
) -> AbstractContextManager[LiveService | None]:
    if options.url is None:
        return nullcontext()
    is_multi_label = model_set.manifest.task == "multi_label"
    kind = MultiLabelLiveService if is_multi_label else LiveService
    return kind(options.url, model_set, options.key_file)


def _sampled(dataset: D, max_images: int) -> D:
    """Return a random sample with a fixed seed; all images if there are no more."""
    if not 0 < max_images < len(dataset.images):
        return dataset
    chosen = random.Random(20).sample(range(len(dataset.images)), max_images)
    note = f"a random sample of {max_images} of {len(dataset.images)} images"
    ordered = tuple(dataset.images[place] for place in sorted(chosen))
    return replace(dataset, images=ordered, notes=(*dataset.notes, note))


def _precisions(model_set: ModelSet) -> tuple[Precision, ...]:
    """Return the precisions that any member has, the float ones first."""
    there = {p for member in model_set.manifest.members for p in member.networks}
    both: tuple[Precision, ...] = ("FP16", "INT8")
    return tuple(p for p in both if p in there)


def _study(model_set: ModelSet, precisions: Sequence[Precision]) -> SubsetStudy:
    """Measure what the members cost, before anything else is compiled in this process."""
    manifest = model_set.manifest
    subsets_of([member.name for member in manifest.members])  # or it says why not
    whole = _whole_precisions(model_set, precisions)
    costs = measure_costs(model_set, whole[-1])
    return SubsetStudy(manifest, whole[-1], costs, _served_as(model_set))


def _whole_precisions(
    model_set: ModelSet, precisions: Sequence[Precision] = ("FP16", "INT8")
) -> list[Precision]:
    """Return the precisions that all members have, the float ones first."""
    members = model_set.manifest.members
    whole = [p for p in precisions if all(m.precision_of(p) in m.networks for m in members)]
    if not whole:
        raise ModelSetError(
            f"--subsets and --calibrate take networks of one precision, and none of "
            f"{model_set.name} has all members; tandem quantize makes the missing ones"
        )
    return whole


def _served_as(model_set: ModelSet) -> str:
    """Return what the service finds the set by: its name, or its folder."""
    try:
        by_name = load_model_set(model_set.name).folder.resolve()
    except ModelSetError:
        by_name = None
    folder = model_set.folder.resolve()
    return model_set.name if by_name == folder else str(folder)


def _report(evaluated: EvaluatedSet, options: EvaluateOptions) -> None:
    manifest, record, measured, live = (
        evaluated.model_set.manifest,
        evaluated.record,
        evaluated.measured,
        evaluated.live,
    )
    if isinstance(measured, MultiLabelEvaluation):
        content = label_sets_json(manifest, record, measured, live)
        _tell(content, options, lambda: show_label_sets(out, manifest, record, measured, live))
        return
    content = as_json(manifest, record, measured, live)
    _tell(content, options, lambda: show(out, manifest, record, measured, live))
    if options.html is not None:
        from calibration.evaluation.report_page import write_page  # brings matplotlib

        write_page(options.html, evaluated.model_set, content, measured)
        err.print(f"the page: {escape(str(options.html))}")
    if options.plot is not None and measured.subsets is not None:
        from calibration.evaluation.report_page import write_plot

        write_plot(options.plot, measured.subsets)
        err.print(f"the plot: {escape(str(options.plot))}")


def _tell(
    content: dict[str, Any], options: EvaluateOptions, show_tables: Callable[[], None]
) -> None:
    """Print the tables or the JSON, and write the JSON's file."""
    if str(options.json_file) != "-":
        show_tables()
    write_json(options.json_file, content)
