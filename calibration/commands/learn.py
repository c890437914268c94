"""``tandem learn``: makes a set for the user's own classes from folders of photographs.

It says what the set is worth: tables, JSON, the photographs most surely wrong, and advice.
"""

import base64
import time
from dataclasses import dataclass
from hashlib import sha256
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import cv2
import numpy as np
import typer
from platformdirs import user_cache_path
from rich.console import Console
from rich.markup import escape

from calibration.commands.evaluate import Tracker, progress_bar
from calibration.commands.models import (
    Into,
    JsonFile,
    ModelDirs,
    Replace,
    check_file,
    err,
    out,
    user_sets_dir,
)
from calibration.evaluation.fitting import MIN_SURE
from calibration.evaluation.report import figures_table, range_of
from calibration.learning.features import FeatureCache
from calibration.learning.photographs import NONE, Photograph
from models.errors import ImageError, ModelSetError
from models.files import check_can_write, needed_folder, write_json, write_result
from models.image import ImageRule, read_image
from models.machine import needs_extra
from models.manifest import ENSEMBLE
from models.model_set import ModelSet, load_model_set, offline_precision, search_path
from models.record import Precision, Score

if TYPE_CHECKING:
    from calibration.learning.learn import Learned

DEFAULT_ORIGIN = "imagenet"
NUM_CROPS = 200
MAX_WRONG, MAX_SHOWN = 10, 60  # photographs that are listed, and shown on the page
THUMBNAIL_PX = 176
MAX_PAIRS = 5  # classes taken for each other
LEAST_MORE, MOST_MORE = 10, 100  # photographs that advice asks for


@dataclass(frozen=True)
class LearnOptions:
    """The options of the command line."""

    name: Annotated[
        str, typer.Argument(metavar="NAME", help="of the new set, or of one to add photographs to")
    ]
    images: Annotated[
        list[Path] | None,
        typer.Option(
            help="folder of classes (FOLDER/<class>/<file>), or a CSV of file,label; may be "
            "repeated. A class called none has photographs of none of the others"
        ),
    ] = None
    corrections: Annotated[
        list[Path] | None,
        typer.Option(
            help="folder of a service's teach_dir, and of its sample_dir: photographs that were "
            "taught, and samples whose right label was reported; may be repeated"
        ),
    ] = None
    shadow: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="let the service there, which serves versions of the set, try the new version in "
            "its shadow",
        ),
    ] = None
    key_file: Annotated[
        Path | None,
        typer.Option(help="holds that service's key, if it wants one  (default: TANDEM_API_KEY)"),
    ] = None
    origin: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="set on whose networks' features it is learned  (default: imagenet, made first "
            "if it is not there; of a learned set those that it has)",
        ),
    ] = None
    validation: Annotated[
        Path | None,
        typer.Option(help="labelled photographs that judge, instead of cross-validation"),
    ] = None
    others: Annotated[
        Path | None, typer.Option(help="folder of photographs that show none of the classes")
    ] = None
    weak_others: Annotated[
        bool,
        typer.Option(
            "--weak-others",
            help="in their place 200 crops of photographs that packages ship, which show little",
        ),
    ] = False
    html: Annotated[
        Path | None, typer.Option(help="write a page with the photographs most surely wrong")
    ] = None
    into: Into = None
    replace: Replace = False
    json_file: JsonFile = None
    model_dir: ModelDirs = None


def learn(options: LearnOptions) -> None:
    """Make a set for your own classes, from about twenty photographs of each.

    Photographs pass the networks of another set once; a linear layer is fitted on their features.
    Repeated for a learned set it adds photographs and classes.
    """
    started = time.perf_counter()
    if not options.images and not options.corrections:
        raise ModelSetError(
            "nothing to learn from: give --images FOLDER, or --corrections with the teach_dir of a "
            "service"
        )
    check_can_write(options.json_file)
    check_file(options.html, "--html")
    with needs_extra("calibrate", "learn"):
        from calibration.learning.learn import Request
        from calibration.learning.learn import learn as learn_set
    into = options.into or user_sets_dir()
    before = None if options.replace else _learned_before(into / options.name)
    origin = _origin(options, before)
    request = Request(
        name=options.name,
        sources=options.images or (),
        corrections=options.corrections or (),
        into=into,
        origin=origin,
        crops=_crops(origin) if options.weak_others else (),
        before=before,
        is_replaced=options.replace,
        others=options.others,
        validation=options.validation,
    )
    cache = FeatureCache(needed_folder(user_cache_path, "features"))
    with progress_bar() as progress:
        track = Tracker(progress, "features of photographs")
        learned = learn_set(request, cache, track, err.print)
    write_json(options.json_file, as_json(learned) | {"seconds": time.perf_counter() - started})
    if options.html is not None:
        write_page(options.html, learned)
        err.print(f"the page: {escape(str(options.html))}")
    if str(options.json_file) != "-":
        show(out, learned)
        _tell(learned.model_set, options, time.perf_counter() - started)
    if options.shadow is not None:
        _into_shadow(options.shadow, learned.model_set, options.key_file)


def _learned_before(folder: Path) -> ModelSet | None:
    """Return the set of the folder, to add photographs to; None if there is none."""
    if not (folder / "manifest.yaml").exists():
        return None
    before = load_model_set(str(folder.absolute()))
    if before.manifest.photographs is None:
        raise ModelSetError(
            f"{folder} was not made by tandem learn, so photographs cannot be added; give "
            "another name, or --replace it"
        )
    return before


def _into_shadow(url: str, model_set: ModelSet, key_file: Path | None) -> None:
    from calibration.evaluation.live import into_shadow

    name = into_shadow(url, model_set, key_file)
    err.print(
        f"{escape(name)} is in the shadow of {escape(url)}; once it has been "
        "compared: tandem traffic promote"
    )


def _crops(origin: ModelSet) -> list[Photograph]:
    """Return crops of packaged photographs as the class ``none``."""
    from calibration.quantization.calibration_images import packaged_images
    from calibration.sets.packaged import WheelSource

    source = WheelSource(needed_folder(user_cache_path, "weights"))
    chosen = packaged_images(NUM_CROPS, origin.manifest.inputs, source)
    return [
        Photograph(
            sha256=sha256(pixels.tobytes()).hexdigest(),
            label=NONE,
            name=f"crop {number} of packaged photographs",
            pixels=pixels,
            origin=f"packaged {number % len(chosen.hashes)}",
        )
        for number, pixels in enumerate(chosen.pixels)
    ]


def _origin(options: LearnOptions, before: ModelSet | None) -> ModelSet:
    """Return the set to learn on; ``imagenet`` is made if it is not there."""
    if options.origin is None and before is not None:
        return before
    name = options.origin or DEFAULT_ORIGIN
    search = search_path(options.model_dir or ())
    if name == DEFAULT_ORIGIN and not any((p / name / "manifest.yaml").exists() for p in search):
        from calibration.commands.fetch import make_imagenet

        err.print("imagenet is not there, and is made first: some minutes, once")
        make_imagenet(user_sets_dir(), None, is_replaced=False)
    return load_model_set(name, search)


def _tell(model_set: ModelSet, options: LearnOptions, seconds: float) -> None:
    name = escape(model_set.argument)
    out.print(f"[green]{escape(str(model_set.folder))}[/] is there after {seconds:.0f} s")
    where = "" if options.into is None else f" --into {escape(str(options.into))}"
    out.print(
        f"tandem serve --model-set {name}\n"
        f"more photographs and classes: tandem learn {escape(options.name)}{where} --images FOLDER"
    )


def as_json(learned: "Learned") -> dict[str, Any]:
    """Return everything that was measured."""
    manifest = learned.model_set.manifest
    return {
        "set": learned.model_set.name,
        "folder": str(learned.model_set.folder),
        "num_classes": manifest.num_classes,
        "num_photographs": learned.num_photographs,
        "num_near_duplicates": learned.num_alike,
        "judged_by": learned.judged_by,
        "accuracy": manifest.accuracy[-1].model_dump(mode="json", exclude_none=True),
        "temperatures": manifest.temperatures,
        "sure": None if manifest.sure is None else manifest.sure.model_dump(mode="json"),
        "fast_plan": None if manifest.fast_plan is None else manifest.fast_plan.judged.model_dump(),
        "confused": confused(learned),
        "wrong": wrong(learned),
        "advice": advice(learned),
        "foreign": None if learned.foreign is None else learned.foreign.__dict__,
        "notes": learned.notes,
    }


def wrong(learned: "Learned") -> list[dict[str, Any]]:
    """Return the photographs answered wrong while held out, the most sure first."""
    rows, truth, labels = learned.rows, learned.held_out.truth, learned.model_set.labels
    answers, likeliest = rows.argmax(axis=1), rows.max(axis=1)
    places = np.flatnonzero(answers != truth)
    return [
        {
            "path": str(learned.photographs[place].path or learned.photographs[place].name),
            "label": labels[truth[place]],
            "answer": labels[answers[place]],
            "probability": round(float(likeliest[place]), 4),
        }
        for place in places[np.argsort(-likeliest[places], kind="stable")].tolist()
    ]


def confused(learned: "Learned") -> list[dict[str, Any]]:
    """Return how often a class was taken for another, the most frequent first."""
    counts = learned.evaluation.tallies[_precision(learned)][ENSEMBLE].confusion.copy()
    np.fill_diagonal(counts, 0)
    labels = learned.model_set.labels
    pairs = sorted(np.argwhere(counts).tolist(), key=lambda pair: -counts[pair[0], pair[1]])
    return [
        {"label": labels[of], "answer": labels[to], "times": int(counts[of, to])}
        for of, to in pairs
    ]


def _precision(learned: "Learned") -> Precision:
    return offline_precision(learned.model_set)


def write_page(path: Path, learned: "Learned") -> None:
    """Write the page with thumbnails of the photographs most surely wrong, in one step."""
    from markupsafe import Markup

    from calibration.evaluation.report_page import confusion, per_class, rendered

    tallies = learned.evaluation.tallies[_precision(learned)]
    labels, content = learned.model_set.labels, as_json(learned)
    page = rendered(
        "calibration.learning",
        "report.html.j2",
        r=content,
        wrong=[w | {"thumbnail": _thumbnail(w["path"])} for w in content["wrong"][:MAX_SHOWN]],
        per_class=Markup(per_class(tallies, labels)),  # matplotlib escapes what it draws
        confusion=Markup(confusion(tallies[ENSEMBLE], labels)),
    )
    write_result(path, page)


def _thumbnail(path: str) -> str | None:
    """Return a small JPEG as a data URL; None if the file is not there, or was no file."""
    try:
        pixels = read_image(Path(path).read_bytes(), ImageRule(THUMBNAIL_PX, THUMBNAIL_PX))
    except (OSError, ImageError):
        return None
    content = cv2.imencode(".jpg", pixels)[1].tobytes()
    return f"data:image/jpeg;base64,{base64.b64encode(content).decode()}"


def advice(learned: "Learned") -> str:
    """Return what would help most, by the errors of photographs held out.

    Errors of a class fall about as the root of its number of photographs, so half of them take
    three times as many more.
    """
    tally = learned.evaluation.tallies[_precision(learned)][ENSEMBLE]
    totals = tally.confusion.sum(axis=1)
    errors = totals - tally.confusion.diagonal()
    manifest, bound = learned.model_set.manifest, learned.model_set.manifest.sure
    if bound is not None:
        sure_errors = [w for w in wrong(learned) if w["probability"] >= bound.probability]
        if len(sure_errors) * 2 > errors.sum() > 1:
            return (
                f"look at the {len(sure_errors)} photographs that are surely wrong first: they "
                "are often in the wrong folder"
            )
    if errors.sum() == 0:
        if manifest.sure is None:
            return (
                f"no photograph held out was wrong, but {int(totals.sum())} are too few to say "
                f"from when on answers are sure; about {_more_for_sure(int(totals.sum()))} more, "
                "of any class, would tell"
            )
        return "no photograph held out was wrong: photographs unlike these would tell more"
    worst = int(errors.argmax())
    more = min(MOST_MORE, max(LEAST_MORE, 10 * ceil(3 * int(totals[worst]) / 10)))
    return (
        f"{more} more photographs of {learned.model_set.labels[worst]}: "
        f"{int(errors[worst])} of {int(totals[worst])} were wrong while held out"
    )


def _more_for_sure(number: int) -> int:
    """Return how many more images a bound needs that no wrong answer reaches (Wilson, 95 %)."""
    return max(10, 10 * ceil((73 + MIN_SURE - number) / 10))


def show(out: Console, learned: "Learned") -> None:
    """Print the tables and the advice."""
    manifest, record = learned.model_set.manifest, learned.model_set.manifest.accuracy[-1]
    for note in learned.notes:
        out.print(f"[yellow]{escape(note)}[/]")
    precisions = list(record.scores)
    names = [*manifest.weights, ENSEMBLE]
    columns = [text for p in precisions for text in (f"{p}\ntop-1", "95 %")]
    table = figures_table("", *columns, "temperature")
    for name in names:
        cells = list[str]()
        for precision in precisions:
            score = record.scores[precision].get(name)
            assert isinstance(score, Score)
            cells += [f"{score.top1:.4f}", range_of(score.top1_interval)]
        table.add_row(name, *cells, f"{manifest.temperatures[name]:.2f}")
    out.print(table)
    out.print(
        f"{manifest.num_classes} classes, {learned.num_photographs} photographs; judged by "
        f"{escape(learned.judged_by)}: by heads that have not seen the photograph"
    )
    if learned.num_alike:
        out.print(
            f"{learned.num_alike} near-duplicates of other photographs were held out with them"
        )
    _show_wrong(out, learned)
    if manifest.sure is None:
        out.print("no bound of sure answers: too few photographs, or too many wrong, show 95 %")
    else:
        low, high = manifest.sure.right_interval
        out.print(
            f"sure from a probability of {manifest.sure.probability:.3f} on: "
            f"{manifest.sure.share:.1%} of the photographs, {manifest.sure.right or 0:.1%} of them "
            f"right (95 %: {low:.1%} to {high:.1%})"
        )
    if (foreign := learned.foreign) is not None:
        without = "no answer, for want of a bound," if foreign.without is None else foreign.without
        out.print(
            f"of {foreign.num} photographs of {NONE}, {foreign.with_none} would be sure of another "
            f"class; without the class {NONE}: {without}"
        )
    else:
        out.print(
            f"photographs of none of the classes (--others FOLDER, or a class {NONE}) keep foreign "
            "ones from being sure, and tell how many would be"
        )
    out.print(f"[bold]what would help most:[/] {escape(advice(learned))}")


def _show_wrong(out: Console, learned: "Learned") -> None:
    for pair in confused(learned)[:MAX_PAIRS]:
        out.print(f"  {pair['times']} x {escape(pair['label'])} taken for {escape(pair['answer'])}")
    if surest := wrong(learned):
        out.print(f"most surely wrong of {len(surest)}; a label may be wrong:")
    for photograph in surest[:MAX_WRONG]:
        out.print(
            f"  {escape(photograph['path'])}: {escape(photograph['answer'])} "
            f"{photograph['probability']:.2f}, not {escape(photograph['label'])}"
        )
