"""``tandem evaluate``: measures a set on labelled images, and keeps its accuracy record.

With ``--calibrate``, ``--sure-at`` or ``--plan`` it fits temperatures, chooses when an answer is
sure, or searches the fast plan instead, and writes that into the manifest.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from calibration.commands.models import JsonFile, ModelDirs, SetName, check_file, err, out
from calibration.datasets import Dataset, LabelSets, read_dataset, read_label_sets
from calibration.evaluation.evaluate import Evaluation, evaluate_set
from calibration.evaluation.fitting import (
    Fitted,
    Rows,
    fit_temperatures,
    fit_trust,
    with_temperatures,
)
from calibration.evaluation.live import LiveResult, LiveService, MultiLabelLiveService
from calibration.evaluation.multi_label import MultiLabelEvaluation, evaluate_label_sets
from calibration.evaluation.plans import search
from calibration.evaluation.record import (
    OutdatedRecordError,
    check_can_keep,
    keep,
    kept_aside,
    record_of,
)
from calibration.evaluation.report import as_json, show
from calibration.evaluation.report_plans import figures_table, plans_json, show_plans, verdict
from calibration.sets.labels import SetClasses
from calibration.sets.transaction import change
from models.accuracy import AccuracyRecord
from models.errors import ModelSetError
from models.files import check_can_write, write_json
from models.ledger import judge, judged, outcome_of
from models.machine import needs_extra
from models.manifest import ENSEMBLE, Manifest, read_manifest
from models.model_set import ModelSet, load_model_set, search_path
from models.plan import SubsetRecord
from models.record import Precision
from models.stores import is_fetched

PRECISIONS: tuple[Precision, ...] = ("FP16", "INT8")  # the float ones first
T = TypeVar("T")
D = TypeVar("D", Dataset, LabelSets)


@dataclass(frozen=True)
class EvaluateOptions:
    """The options of the command line."""

    name: SetName
    images: Annotated[
        Path,
        typer.Option(
            help="ImageFolder (DIR/<class>/<file>), or a CSV of file,label; of a multi-label set "
            "file,label;label"
        ),
    ]
    class_ids: Annotated[
        Path | None,
        typer.Option(
            help="the class ids that the images' folders are named by, as WordNet's, in the "
            "networks' order  (default: the set's own)"
        ),
    ] = None
    url: Annotated[
        str | None,
        typer.Option(help="also through this running service; it must answer as in process"),
    ] = None
    plan: Annotated[
        bool,
        typer.Option(
            "--plan",
            help="search the set's fast plan: which members to ask first, and when their answer "
            "stands; judge it on other images, and write it into the manifest",
        ),
    ] = False
    subsets: Annotated[bool, typer.Option("--subsets", hidden=True)] = False  # what --plan was
    plot: Annotated[
        Path | None, typer.Option(help="with --plan: draw the plans, FILE.svg or FILE.png")
    ] = None
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="fit a temperature for each member and one for the average on some of the "
            "images, judge on others, and write them into the manifest",
        ),
    ] = False
    sure_at: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            max=0.999,
            help="choose from which probability on some of the images show that this share of "
            "answers is right, for all members and for some of them; judge on others, and write "
            "it into the manifest, with the bounds of answer sets",
        ),
    ] = None
    max_images: Annotated[
        int,
        typer.Option(
            min=0,
            show_default=False,
            help="a random sample this large, not recorded  (default: all)",
        ),
    ] = 0
    record: Annotated[
        bool, typer.Option(help="keep the result in the set's manifest, where serve reads it")
    ] = True
    json_file: JsonFile = None
    html: Annotated[Path | None, typer.Option(help="write a page with plots")] = None
    model_dir: ModelDirs = None
    key_file: Annotated[
        Path | None,
        typer.Option(help="holds that service's key, if it wants one  (default: TANDEM_API_KEY)"),
    ] = None

    @property
    def has_tables(self) -> bool:
        """Whether stdout is for tables: it has no JSON."""
        return str(self.json_file) != "-"

    @property
    def fitting(self) -> str:
        """The option that fits something and evaluates nothing else."""
        if self.calibrate:
            return "--calibrate"
        return "--sure-at" if self.sure_at is not None else "--plan"


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
    if options.calibrate or options.sure_at is not None or options.plan:
        _fit(model_set, options)
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
        every = read_label_sets(options.images, model_set, _ids(model_set, options))
        label_sets = _sampled(every, options.max_images)
        measure = partial(evaluate_label_sets, model_set, label_sets)
    else:
        dataset = _dataset(model_set, options)
        measure = partial(evaluate_set, model_set, dataset)
    there = {p for member in model_set.manifest.members for p in member.networks}
    url = options.url
    live = nullcontext() if url is None else kind(url, model_set, options.key_file)
    with live as service, _progress() as progress:
        every = tuple(p for p in PRECISIONS if p in there)
        precisions = (service.precision,) if service else every
        measured = measure(
            precisions,
            track=_Tracker(progress, f"{model_set.name} {' and '.join(precisions)}"),
            observe=service.observe if service else None,
        )
    record = record_of(model_set, measured)
    return EvaluatedSet(model_set, record, measured, service.result if service else None)


def _dataset(model_set: ModelSet, options: EvaluateOptions) -> Dataset:
    dataset = read_dataset(options.images, model_set, _ids(model_set, options))
    return _sampled(dataset, options.max_images)


def _ids(model_set: ModelSet, options: EvaluateOptions) -> Sequence[str] | None:
    """Return the class ids of the option, as many as the set has classes."""
    if options.class_ids is None:
        return None
    of_set = SetClasses(model_set.labels, None)
    return of_set.with_ids(options.class_ids, model_set.name, lambda *_: None).ids


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


def _fit(model_set: ModelSet, options: EvaluateOptions) -> None:
    _check_fitting(options, model_set)
    if options.max_images and options.record:
        options = replace(options, record=False)
        err.print("--max-images: a sample's result is shown, and not written into the manifest")
    if options.record:
        check_can_keep(model_set.folder, f"tandem evaluate {options.fitting}")
    dataset = _dataset(model_set, options)
    manifest = model_set.manifest
    if options.calibrate:  # rows without any temperature
        manifest = with_temperatures(manifest, dict.fromkeys([*manifest.weights, ENSEMBLE], 1.0))
    if not (whole := [*model_set.manifest.fingerprints]):
        raise ModelSetError(
            f"--calibrate, --sure-at and --plan take networks of one precision, and none of "
            f"{model_set.name} has all members; tandem quantize makes the missing ones"
        )
    rows = Rows(manifest, whole[0])  # INT8 rather than a float one
    with _progress() as progress:
        track = _Tracker(progress, f"{model_set.name} {rows.precision}")
        plain = ModelSet(model_set.folder, manifest)
        measured = evaluate_set(plain, dataset, (rows.precision,), track=track, observe=rows.add)
    if options.plan:
        _fit_plan(model_set, rows, measured, options)
    elif options.sure_at is not None:
        _choose_sure(model_set, rows, options)
    else:
        _fit_temperatures(model_set, rows, options)


def _check_fitting(options: EvaluateOptions, model_set: ModelSet) -> None:
    option = options.fitting
    what = {
        "--calibrate": "fits temperatures",
        "--sure-at": "chooses when an answer is sure",
        "--plan": "searches a fast plan",
    }[option]
    if model_set.manifest.task == "multi_label":
        raise ModelSetError(
            f"{option}: {model_set.name} is multi-label, and it {what} of classes that exclude "
            "each other; leave it out"
        )
    others = {
        "--url": options.url is not None,
        "--html": options.html is not None,
        "--sure-at": options.calibrate and options.sure_at is not None,
        "--plan": options.plan and option != "--plan",
    }
    if named := [name for name, is_asked in others.items() if is_asked]:
        raise ModelSetError(
            f"{' and '.join(named)}: {option} {what} and evaluates nothing else; "
            "evaluate again afterwards"
        )


def _fit_temperatures(model_set: ModelSet, rows: Rows, options: EvaluateOptions) -> None:
    fitted = fit_temperatures(rows)
    facts = {"set": model_set.name, "precision": rows.precision, **asdict(fitted)}
    write_json(options.json_file, facts)
    if options.has_tables:
        _show_fitted(fitted)
    if not options.record:
        return
    manifest = with_temperatures(model_set.manifest, fitted.temperatures)
    _write(model_set, manifest, options.fitting)
    if options.has_tables:
        again = f"tandem evaluate {escape(model_set.argument)} --images DIR"
        err.print(
            f"written into {escape(str(model_set.folder))}/manifest.yaml; the accuracy record\n"
            f"is of before, bounds and plan are gone: {again} --sure-at 0.95, --plan, and\n"
            "without either"
        )


def _choose_sure(model_set: ModelSet, rows: Rows, options: EvaluateOptions) -> None:
    assert options.sure_at is not None
    manifest = fit_trust(model_set.manifest, rows, options.sure_at)
    sure, answer_set = manifest.sure, manifest.answer_set
    assert sure is not None
    assert answer_set is not None
    facts = {"set": model_set.name, "precision": rows.precision, **sure.model_dump(mode="json")}
    facts["answer_set"] = answer_set.model_dump(mode="json")
    facts["trust"] = [record.model_dump(mode="json") for record in manifest.trust]
    write_json(options.json_file, facts)
    if options.has_tables:
        _show_sure("", manifest)
        for record in manifest.trust:
            _show_sure(f"{' + '.join(record.members)} alone: ", record)
        out.print(
            f"answer sets hold the right class of {answer_set.coverage:.1%} of them, with "
            f"{answer_set.mean_size:.2f} classes in the mean"
        )
    if options.record:
        _write(model_set, manifest, options.fitting)


def _show_sure(who: str, record: Manifest | SubsetRecord) -> None:
    if (sure := record.sure) is None:
        out.print(f"{who}no bound")
        return
    low, high = sure.right_interval
    out.print(
        f"{who}sure from a probability of {sure.probability:.3f} on: {sure.share:.1%} of "
        f"{sure.num_images} images that it was not chosen by, "
        f"{sure.right or 0:.1%} of them right (95 %: {low:.1%} to {high:.1%})"
    )


def _fit_plan(
    model_set: ModelSet, rows: Rows, measured: Evaluation, options: EvaluateOptions
) -> None:
    manifest = model_set.manifest
    costs = {name: of[rows.precision] for name, of in measured.cpu_ms_per_image.items()}
    facts = (costs, measured.dataset.name, measured.images_sha256)
    result = search(manifest, rows, rows.precision, *facts)
    write_json(options.json_file, {"set": model_set.name, **plans_json(result)})
    if options.has_tables:
        show_plans(out, result)
    if options.plot is not None:
        from calibration.evaluation.report_page import write_plot

        write_plot(options.plot, result)
        err.print(f"the plot: {escape(str(options.plot))}")
    if result.outcome == "refused":
        raise ModelSetError(f"--plan: {verdict(result)}: nothing is written; give more images")
    if options.record:
        manifest = manifest.model_copy(update={"fast_plan": result.record})
        _write(model_set, manifest, options.fitting)
        err.print(f"serve it with: tandem serve --model-set {model_set.argument} --plan fast")


def _write(model_set: ModelSet, manifest: Manifest, option: str) -> None:
    folder = model_set.folder
    with change(folder, f"tandem evaluate {option}") as staging:
        if read_manifest(folder) != model_set.manifest:
            raise ModelSetError(f"{folder} was changed meanwhile: nothing is written; fit again")
        staging.move_in(manifest)


def _show_fitted(fitted: Fitted) -> None:
    columns = ("ECE\nbefore", "after", "top-1\nbefore", "after", "nats\nbefore", "after")
    table = figures_table("", "temperature", *columns)
    for name, temperature in fitted.temperatures.items():
        before, after = fitted.before[name], fitted.after[name]
        table.add_row(
            name,
            f"{temperature:.3f}",
            *(f"{value:.4f}" for value in (before.calibration_error, after.calibration_error)),
            *(f"{value:.4f}" for value in (before.top1, after.top1)),
            *(f"{value:.3f}" for value in (before.log_likelihood, after.log_likelihood)),
        )
    out.print(table)
    out.print(
        f"fitted to {fitted.num_fitted} images, judged on {fitted.num_judged} others; ECE: "
        "calibration error; nats: mean log-likelihood"
    )


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
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    return Progress(
        *columns, TimeRemainingColumn(), console=err, transient=True, disable=not err.is_terminal
    )


def _sampled(dataset: D, max_images: int) -> D:
    """Return a random sample with a fixed seed; all images if there are no more."""
    if not 0 < max_images < len(dataset.images):
        return dataset
    chosen = random.Random(20).sample(range(len(dataset.images)), max_images)
    note = f"a random sample of {max_images} of {len(dataset.images)} images"
    ordered = tuple(dataset.images[place] for place in sorted(chosen))
    return replace(dataset, images=ordered, notes=(*dataset.notes, note))
