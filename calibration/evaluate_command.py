"""``tandem evaluate``: what a set's networks are worth, in tables, JSON and a page with plots."""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from models.errors import ModelSetError
from models.extras import needs_extra
from models.model_set import ModelSet, load_model_set, search_path
from models.record import Precision

if TYPE_CHECKING:
    from calibration.dataset import Dataset, LabelledImage
    from calibration.evaluate import Evaluation

err = Console(stderr=True, soft_wrap=True, highlight=False)
out = Console(soft_wrap=True, highlight=False)


def evaluate(
    name: Annotated[str, typer.Argument(metavar="SET", help="name of a set, or its folder")],
    images: Annotated[
        Path, typer.Option(help="ImageFolder (DIR/<class>/<file>), or a CSV of file,label")
    ],
    url: Annotated[
        str | None,
        typer.Option(help="also through this running service; it must answer as in process"),
    ] = None,
    fit_weights: Annotated[
        bool, typer.Option("--fit-weights", help="do fitted weights beat the plain average?")
    ] = False,
    max_images: Annotated[
        int, typer.Option(min=0, help="a random sample this large, not recorded  [default: all]")
    ] = 0,
    record: Annotated[
        bool, typer.Option(help="keep the result in the set's manifest, where serve reads it")
    ] = True,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="write everything as JSON; - is stdout")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="write a page with plots")] = None,
    model_dir: Annotated[
        list[Path] | None, typer.Option(help="searched before the user's and the bundled sets")
    ] = None,
) -> None:
    """Measure every member and the ensemble, float and INT8, on labelled images.

    Exit code 1: INT8 lost more than the set's max_drop, or the live service answered otherwise.
    """
    with needs_extra("calibrate", "evaluate"):
        from calibration.evaluate import evaluate as run
        from calibration.ledger import keep, record_of
    for path in (json_file, html):
        check_can_write(path)
    model_set = load_model_set(name, search_path(model_dir or ()))
    dataset = _sampled(_read(images, model_set), max_images)
    with _service(url, model_set) as service, _progress() as progress:
        precisions = (service.precision,) if service else _precisions(model_set)
        measured = run(
            model_set,
            dataset,
            precisions,
            track=_Tracker(progress, f"{model_set.name} {' and '.join(precisions)}"),
            observe=service.observe if service else None,
            is_weight_fitted=fit_weights,
        )
    found = record_of(model_set, measured)
    live = service.result if service else None
    problem = None
    if record and not (max_images or service):
        try:
            keep(model_set.folder, found)
            err.print(f"recorded in {escape(str(model_set.folder))}/manifest.yaml")
        except ModelSetError as error:
            problem = error  # first what was found, then why it is not kept
    _report(model_set, found, measured, live, json_file, html)
    if problem is not None:
        raise problem
    if fit_weights and measured.fitted is None:
        err.print("[yellow]too few images to fit weights on one half and judge on the other[/]")
    is_over = any(drop.top1 > model_set.manifest.max_drop for drop in found.drops.values())
    if is_over:
        err.print("[red]INT8 lost more than max_drop; tandem serve will refuse this set[/]")
    if live and not live.is_same:
        err.print("[red]the live service does not answer as the networks in this process[/]")
    if is_over or (live and not live.is_same):
        raise typer.Exit(1)


class _Tracker:
    """Advances a progress bar by the images of each batch that is handed out."""

    def __init__(self, progress: Progress, what: str) -> None:
        self._progress, self._what = progress, what

    def __call__(
        self, batches: Iterable[Sequence["LabelledImage"]], total: int
    ) -> Iterator[Sequence["LabelledImage"]]:
        task = self._progress.add_task(self._what, total=total)
        for batch in batches:
            yield batch
            self._progress.advance(task, len(batch))


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(
        *columns, TimeRemainingColumn(), console=err, transient=True, disable=not err.is_terminal
    )


def _service(url: str | None, model_set: ModelSet) -> Any:
    if url is None:
        return nullcontext()
    from calibration.live import LiveService

    service: LiveService = LiveService(url, model_set)
    return service


def _read(images: Path, model_set: ModelSet) -> "Dataset":
    from calibration.dataset import read_dataset

    return read_dataset(images, model_set)


def _sampled(dataset: "Dataset", max_images: int) -> "Dataset":
    """Return a random sample with a fixed seed; all images if there are no more."""
    import random

    if not 0 < max_images < len(dataset.images):
        return dataset
    chosen = random.Random(20).sample(dataset.images, max_images)
    note = f"a random sample of {max_images} of {len(dataset.images)} images"
    ordered = tuple(sorted(chosen, key=lambda image: image.path))
    return replace(dataset, images=ordered, notes=(*dataset.notes, note))


def _precisions(model_set: ModelSet) -> tuple[Precision, ...]:
    """Return the precisions that any member has, the float ones first."""
    there = {p for member in model_set.manifest.members for p in member.networks}
    both: tuple[Precision, ...] = ("FP16", "INT8")
    return tuple(p for p in both if p in there)


def check_can_write(path: Path | None) -> None:
    """Find out before hours of work that the result has nowhere to go."""
    if path is None or str(path) == "-":
        return
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ModelSetError(f"cannot write {path}: give a file in a folder that exists")


def _report(
    model_set: ModelSet,
    record: Any,
    measured: "Evaluation",
    live: Any,
    json_file: Path | None,
    html: Path | None,
) -> None:
    from calibration.report import as_json, show

    content = as_json(model_set.manifest, record, measured, live)
    if str(json_file) == "-":
        typer.echo(json.dumps(content, indent=2))
    else:
        show(out, model_set.manifest, record, measured, live)
        if json_file is not None:
            json_file.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    if html is not None:
        from calibration.report_html import write_page

        write_page(html, model_set, content, measured)
        err.print(f"the page: {escape(str(html))}")
