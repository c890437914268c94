"""The options of ``tandem evaluate``, and what its runs share: the sample and the progress bar."""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from calibration.commands.models import JsonFile, ModelDirs, SetName, err
from calibration.datasets import Dataset, LabelSets
from calibration.sets.labels import SetClasses
from models.errors import ModelSetError
from models.model_set import ModelSet

T = TypeVar("T")
D = TypeVar("D", Dataset, LabelSets)


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
