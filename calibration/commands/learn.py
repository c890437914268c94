"""``tandem learn``: makes a set for the user's own classes from folders of photographs."""

import time
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated

import typer
from platformdirs import user_cache_path
from rich.markup import escape

from calibration.commands.evaluate_options import Tracker, progress_bar
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
from calibration.learning.features import FeatureCache
from calibration.learning.photographs import NONE, Photograph
from models.errors import ModelSetError
from models.files import check_can_write, needed_folder, write_json
from models.machine import needs_extra
from models.model_set import ModelSet, load_model_set, search_path

DEFAULT_ORIGIN = "imagenet"
NUM_CROPS = 200


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
        from calibration.learning.report import as_json, show, write_page
    into = options.into or user_sets_dir()
    folder = into / options.name
    before = None
    if (folder / "manifest.yaml").exists() and not options.replace:
        before = load_model_set(str(folder.absolute()))
        if before.manifest.photographs is None:
            raise ModelSetError(
                f"{folder} was not made by tandem learn, so photographs cannot be added; give "
                "another name, or --replace it"
            )
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
        from calibration.evaluation.live import into_shadow

        name = into_shadow(options.shadow, learned.model_set, options.key_file)
        err.print(
            f"{escape(name)} is in the shadow of {escape(options.shadow)}; once it has been "
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
