"""``tandem evaluate``: measures a set on labelled images, and keeps its accuracy record.

With ``--calibrate``, ``--sure-at`` or ``--plan`` it fits temperatures, chooses when an answer is
sure, or searches the fast plan instead (:mod:`calibration.commands.fit`).
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from calibration.commands.models import JsonFile, ModelDirs, SetName, check_file, err, out
from calibration.datasets import Dataset, LabelSets, read_dataset, read_label_sets
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
from calibration.sets.labels import SetClasses
from models.errors import ModelSetError
from models.files import check_can_write, write_json
from models.ledger import judge, judged, outcome_of
from models.machine import needs_extra
from models.manifest import read_manifest
from models.model_set import ModelSet, load_model_set, search_path
from models.record import AccuracyRecord, Precision
from models.stores import is_fetched

T = TypeVar("T")
D = TypeVar("D", Dataset, LabelSets)
PRECISIONS: tuple[Precision, ...] = ("FP16", "INT8")  # the float ones first


@dataclass(frozen=True)
class EvaluateOptions:
    """The options of the command line."""

    name: SetName
    images: Annotated[
        Path | None,
        typer.Option(
            help="ImageFolder (DIR/<class>/<file>), or a CSV of file,label; of a multi-label set "
            "file,label;label; needed except for --foreign alone"
        ),
    ] = None
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
    foreign: Annotated[
        Path | None,
        typer.Option(
            help="a folder of images that show none of the classes: measures how many answers to "
            "half of them are sure; with --sure-at and --plan the other half chooses the bounds, "
            "of which at most 5 % may be sure"
        ),
    ] = None
    wrong_weight: Annotated[
        float | None,
        typer.Option(
            min=1,
            max=100,
            help="with --calibrate and --sure-at: count each wrong answer this many times, where "
            "the networks probably learned from the images; --plan takes it from the bound",
            show_default=False,
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
        """The option that fits something and evaluates nothing else; empty: none."""
        if self.calibrate:
            return "--calibrate"
        if self.sure_at is not None:
            return "--sure-at"
        return "--plan" if self.plan else ""

    @property
    def labelled(self) -> Path:
        """The labelled images."""
        if self.images is None:
            what = self.fitting or "evaluate"
            raise ModelSetError(f"{what} needs labelled images: --images DIR or --images LIST")
        return self.images

    def ids_of(self, model_set: ModelSet) -> Sequence[str] | None:
        """Return the class ids of the option, as many as the set has classes; None: its own."""
        if self.class_ids is None:
            return None
        of_set = SetClasses(model_set.labels, None)
        return of_set.with_ids(self.class_ids, model_set.name, lambda *_: None).ids


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
    # Late, since fit.py has its options from here.
    from calibration.commands.fit import fit, measure_foreign

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


class Tracker:
    """Advances a progress bar by the images of each batch that is handed out."""

    def __init__(self, progress: Progress, what: str) -> None:
        self._progress, self._what = progress, what

    def __call__(self, batches: Iterable[Sequence[T]], total: int) -> Iterator[Sequence[T]]:
        task = self._progress.add_task(self._what, total=total)
        for batch in batches:
            yield batch
            self._progress.advance(task, len(batch))


def progress_bar() -> Progress:
    """Return a bar that shows nothing where stderr is no terminal."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    return Progress(
        *columns, TimeRemainingColumn(), console=err, transient=True, disable=not err.is_terminal
    )


def sampled(dataset: D, max_images: int) -> D:
    """Return a random sample with a fixed seed; all images if there are no more."""
    if not 0 < max_images < len(dataset.images):
        return dataset
    chosen = random.Random(20).sample(range(len(dataset.images)), max_images)
    note = f"a random sample of {max_images} of {len(dataset.images)} images"
    ordered = tuple(dataset.images[place] for place in sorted(chosen))
    return replace(dataset, images=ordered, notes=(*dataset.notes, note))
