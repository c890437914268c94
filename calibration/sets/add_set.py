"""Creates a model set from existing classifiers: ONNX, OpenVINO IR, TFLite or PyTorch files.

It does so in a process of its own, since a damaged file can crash the library that reads it. For
example, OpenVINO 2026.4 crashes on a convolution without weights.

``tandem models add --try PHOTO`` makes no set, and shows answers by each usual range of pixels. A
network is imported once, and gets floats: each range is computed here, by OpenVINO.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import openvino as ov
from pydantic import ValidationError

from calibration.label_files import read_class_names
from calibration.sets.ending import set_task
from calibration.sets.import_network import Imported
from calibration.sets.importing import STATE, import_member, import_weights
from calibration.sets.input import ColorOrder, Normalisation
from calibration.sets.input_range import CAFFE, CONVENTIONS, ORDERS, usual
from calibration.sets.labels import Say, SetClasses, label_doubt
from calibration.sets.options import ClassMap, FileOptions, MemberOptions
from calibration.sets.transaction import Staging, check_free, create
from models.child_process import OUT_OF_MEMORY, ChildDiedError, Send, last_words, run_apart
from models.ensemble import DEFAULT_THRESHOLD, Probabilities
from models.errors import ModelSetError, TandemError, reading
from models.image import SCALED, Size, read_image, size_text
from models.manifest import MAX_MEMBERS, Manifest, MemberRecord, Network, read_manifest
from models.model_set import PARTIAL_SUFFIX, ModelSet
from models.network import Pixels
from models.openvino_network import compile_with, fixed_batch
from models.own_functions import load_function, tried_views
from models.record import FileRecord, ImageRecord, Precision, RuntimeName, Task, sha256_of

NOT_YET = FileRecord(path="not-written-yet", sha256="0" * 64)
MAX_PHOTOS = 16
UNIT = usual("0 to 1", "BGR")  # by which --try imports: no colours change places
CLEAN_UP_S = 60.0  # after Ctrl-C: removing a staged set waits until a runtime's call returns


@dataclass(frozen=True)
class NewSet:
    """The files and options of a new set; a member may have a float and an INT8 file."""

    name: str
    members: Sequence[tuple[str, Path]]
    labels: Path | None = None  # None: those of the networks' metadata
    class_ids: Path | None = None
    # The class ids of members whose classes, or their order, differ from the set's.
    member_class_ids: Mapping[str, Path] = field(default_factory=dict)
    options: MemberOptions = field(default_factory=MemberOptions)  # of all members
    member_options: Mapping[str, MemberOptions] = field(default_factory=dict)  # where they differ
    runtimes: Mapping[str, RuntimeName] = field(default_factory=dict)  # where it is not OpenVINO
    is_trusted: bool = False  # PyTorch files may be loaded, which runs code of theirs
    architectures: Mapping[str, str] = field(default_factory=dict)  # of safetensors: torchvision's
    weights: Mapping[str, float] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    description: str = ""
    hint: str = ""
    max_drop: float = 0.005
    preprocess: str | None = None  # the set's own function, package.module:function
    task: Task | None = None  # None: multi_label if all networks end in a sigmoid
    threshold: float | None = None  # of multi_label; None: DEFAULT_THRESHOLD

    def options_of(self, name: str) -> MemberOptions:
        """Return a member's options."""
        own = self.member_options.get(name)
        return self.options if own is None else own.over(self.options)


@dataclass(frozen=True)
class _Member:
    """One file of a member."""

    name: str
    path: Path
    imported: Imported


def add_set(
    new: NewSet, into: Path, *, is_replaced: bool = False, say: Say = lambda *_: None
) -> ModelSet:
    """Create the set in the folder ``into/NAME``, which appears complete or not at all.

    ``say`` is called for each member with how its network was read, and what may be wrong with it.

    Raises:
        ModelSetError: a file is not a classifier of these kinds, or classes and labels differ.
        ValidationError: a name or number is not allowed in a manifest.
    """
    check_free(into / new.name, is_replaced=is_replaced)  # before networks are read and tried
    _check_members(new)
    stated = None
    if new.labels is not None:
        stated = SetClasses.read(new.labels, new.class_ids, say)
    ids = stated.ids if stated is not None else _own_ids(new.class_ids)
    num_labels = 0 if stated is None else len(stated.labels)
    imported = [_imported(new, name, path, num_labels, ids) for name, path in new.members]
    classes = stated or _from_metadata(new, imported, say)
    labels = classes.labels
    for added in imported:
        facts, doubts = f"{added.imported.facts}; {_resizing(new, added)}", [added.imported.doubt]
        if added.name not in new.member_class_ids:
            doubts.append(label_doubt(labels, added.imported.labels))
        say(added.name, facts, "; ".join(filter(None, doubts)) or None)
    task = set_task({f"{added.name} ({added.path})": added.imported.task for added in imported})
    if new.threshold is not None and task != "multi_label":
        raise ModelSetError(
            f"--threshold {new.threshold:g} is of multi-label sets, and these networks' classes "
            "exclude each other (none ends in a sigmoid): leave it out, or say --task multi_label"
        )
    _check_alike(imported, len(labels), str(new.labels or "their metadata"))
    planned = _planned(new, imported, len(labels), task)
    if (function := load_function(planned.preprocess, "preprocess")) is not None:
        tried_views(function, planned.inputs)
    folder = into / planned.name
    with create(folder, is_replaced=is_replaced, made_by="tandem models add") as staging:
        update = {**classes.written(staging), "members": _members(planned, imported, staging)}
        finish(staging, planned.model_copy(update=update))
    return ModelSet(folder, read_manifest(folder))


def finish(staging: Staging, manifest: Manifest) -> None:
    """Record the golden answers and move everything in."""
    staging.move_in(manifest.model_copy(update={"golden": staging.golden(manifest)}))


def _check_members(new: NewSet) -> None:
    names = {name for name, _ in new.members}
    named = [*new.weights, *new.sources, *new.member_options, *new.member_class_ids]
    named += [*new.runtimes, *new.architectures]
    if strangers := sorted(set(named) - names):
        raise ModelSetError(
            f"no --member {strangers[0]!r} that a weight, source, option, runtime or class ids are "
            "for"
        )
    if len(names) > MAX_MEMBERS:
        raise ModelSetError(
            f"{len(names)} members; a set has 1 to {MAX_MEMBERS}: leave some out, or make two sets"
        )
    if new.member_class_ids and new.class_ids is None:
        raise ModelSetError(
            "--member-class-ids without --class-ids: classes are mapped to the set's by their ids, "
            "so give the set's too"
        )


def _own_ids(class_ids: Path | None) -> Sequence[str] | None:
    """Return the ids of a file, where no file has the labels; None without one."""
    if class_ids is None:
        return None
    names = read_class_names(class_ids)
    return names.ids or names.names


def _from_metadata(new: NewSet, imported: Sequence[_Member], say: Say) -> SetClasses:
    labels = _labels_of(imported, say)
    return SetClasses(labels, None).with_ids(new.class_ids, "their metadata", say)


def _labels_of(imported: Sequence[_Member], say: Say) -> tuple[str, ...]:
    """Return the labels in the networks' metadata; raise if there are none, or they differ."""
    fitting = [
        (added, own)
        for added in imported
        if (own := added.imported.labels) and len(own) == added.imported.num_classes
    ]
    if not fitting:
        files = ", ".join(str(added.path) for added in imported)
        raise ModelSetError(
            f"{files}: no names of all classes in the metadata; give --labels FILE, one label a "
            "line in the network's order"
        )
    first, labels = fitting[0]
    for added, own in fitting:
        if problem := label_doubt(labels, own):
            raise ModelSetError(
                f"{added.path}: compared with {first.path}, {problem.partition('. ')[0]}: give "
                "--labels, and --class-ids with --member-class-ids where the orders differ"
            )
    say(first.name, f"{len(labels)} labels of its metadata, {labels[0]} to {labels[-1]}", None)
    return labels


def _imported(
    new: NewSet, name: str, path: Path, num_labels: int, ids: Sequence[str] | None
) -> _Member:
    """Import a member's file; its class ids are mapped to the set's, ``ids``, if there are any."""
    classes = None
    if ids is not None and (own := new.member_class_ids.get(name)) is not None:
        of_member = read_class_names(own)
        classes = ClassMap(tuple(of_member.ids or of_member.names), tuple(ids), str(own))
    how = replace(file_options(new, name), classes=classes)
    return _Member(name, path, import_file(new, name, path, num_labels, how))


def file_options(new: NewSet, name: str) -> FileOptions:
    """Return how a member's file is read."""
    options = new.options_of(name)
    return FileOptions(
        options.input_size,
        options.normalisation,
        options.outputs or "auto",
        options.layout,
        options.color_order,
        task=new.task,
        is_stated=options.mean is not None or options.scale is not None,
    )


def import_file(new: NewSet, name: str, path: Path, num_labels: int, how: FileOptions) -> Imported:
    """Import a member's file for its runtime; ``num_labels`` are the set's."""
    runtime = new.runtimes.get(name, "openvino")
    if path.suffix == STATE:
        return import_weights(path, new.architectures.get(name), num_labels, runtime, how)
    return import_member(path, runtime, how, is_trusted=new.is_trusted)


def _resizing(new: NewSet, member: _Member) -> str:
    image = new.options_of(member.name).image(member.imported.form.size)
    size = size_text(image.input_size)
    if image.resize not in SCALED:
        how = {"stretch": "stretched", "smart_resize": "cropped and resized"}.get(
            image.resize, f"with borders of {image.fill} resized"
        )
        return f"pictures {how} to {size} px, {image.interpolation}"
    how = "resized" if image.resize == "crop" else "stretched"
    return (
        f"pictures {how} to {image.resize_shorter} px and cropped to {size}, {image.interpolation}"
    )


def _planned(new: NewSet, imported: Sequence[_Member], num_classes: int, task: Task) -> Manifest:
    """Return the manifest without files, so that it is checked before any file is written."""
    if new.name.endswith(PARTIAL_SUFFIX):
        raise ModelSetError(f"{new.name!r}: sets that end in {PARTIAL_SUFFIX} are half-made ones")
    firsts = {added.name: added for added in reversed(imported)}  # the first file of each
    images = {
        name: new.options_of(name).image(added.imported.form.size) for name, added in firsts.items()
    }
    image = images[imported[0].name]  # the set's; members that take another have their own

    def record(name: str) -> MemberRecord:
        first, own = firsts[name], [a.imported for a in imported if a.name == name]
        source = new.sources.get(name) or f"{first.path.name}, sha256 {sha256_of(first.path)}"
        return MemberRecord(
            name=name,
            weight=new.weights.get(name, 1.0),
            source=source,
            networks={},
            image=None if images[name] == image else images[name],
            fixed_batch=first.imported.fixed_batch,
            imported_int8=all(file.precision == "INT8" for file in own),
        )

    return Manifest(
        name=new.name,
        description=new.description or f"{num_classes} classes",
        image=image,
        task=task,
        threshold=(new.threshold or DEFAULT_THRESHOLD) if task == "multi_label" else None,
        num_classes=num_classes,
        labels=NOT_YET,
        members=tuple(record(name) for name in dict.fromkeys(added.name for added in imported)),
        max_drop=new.max_drop,
        preprocess=new.preprocess,
        hint=new.hint,
    )


def _check_alike(imported: Sequence[_Member], num_labels: int, labels: str) -> None:
    facts = [
        f"{added.name} ({added.path}): {size_text(added.imported.form.size)} px, "
        f"{added.imported.num_classes} classes"
        for added in imported
    ]
    if any(added.imported.num_classes != num_labels for added in imported):
        more = {added.imported.num_classes - num_labels for added in imported}
        background = {
            1: "Its one class more is often the background, first: then write it into the labels. ",
            -1: "If the first label is the background, which the network has not, remove it. ",
        }
        raise ModelSetError(
            f"these do not make one set: {'; '.join(facts)}; {labels}: {num_labels} labels. "
            f"{background.get(more.pop(), '') if len(more) == 1 else ''}The "
            "number of classes must be the same; a member whose classes are others, or more, is "
            "mapped by their ids: --class-ids and --member-class-ids"
        )
    sizes: dict[str, Size] = {}
    for added in imported:
        size = added.imported.form.size
        if sizes.setdefault(added.name, size) != size:
            raise ModelSetError(
                f"the networks of one member take different sizes: {'; '.join(facts)}; give each "
                "a name of its own"
            )


def _members(
    planned: Manifest, imported: Sequence[_Member], staging: Staging
) -> tuple[MemberRecord, ...]:
    networks: dict[str, dict[Precision, Network]] = {}
    for added in imported:
        by, precision = networks.setdefault(added.name, {}), added.imported.precision
        if precision in by:
            raise ModelSetError(
                f"--member {added.name} is given twice as {precision}; a member has one float and "
                "one INT8 network"
            )
        stem = f"{added.name}-{precision.lower()}"
        network = added.imported.network
        if isinstance(network, bytes):
            by[precision] = staging.file(network, stem)
        else:
            by[precision] = staging.network(network, stem, is_float=precision == "FP16")
    return tuple(m.model_copy(update={"networks": networks[m.name]}) for m in planned.members)


def add_set_apart(new: NewSet, into: Path, *, is_replaced: bool, say: Say) -> ModelSet:
    """Create the set like :func:`calibration.sets.add_set.add_set`, in another process.

    Raises:
        ModelSetError: what that function raises, or a file crashed the process.
    """
    # OpenVINO tries every reader on a file, and TensorFlow's print lines of their own.
    with tempfile.NamedTemporaryFile(prefix="tandem-add-") as log:
        try:
            made: Path = run_apart(
                _folder_of_added,
                *(new, into, is_replaced),
                heard=lambda said: say(*said),
                printed=log.file,
                patience_s=CLEAN_UP_S,
            )
        except ChildDiedError as error:
            files = ", ".join(str(path) for _, path in new.members)
            what_died = f"{files}: the process that read this died ({error}"
            if str(error) == OUT_OF_MEMORY:
                raise ModelSetError(f"{what_died})") from None
            which = "" if len(new.members) == 1 else " Add them one by one to see which"
            raise ModelSetError(
                f"{what_died}; {last_words(Path(log.name))}): a file is damaged, or its runtime "
                f"cannot take it. Export it again, or try another --runtime.{which}"
            ) from None
    return ModelSet(made, read_manifest(made))


def _folder_of_added(new: NewSet, into: Path, is_replaced: bool, send: Send) -> Path:
    made = add_set_here(new, into, is_replaced=is_replaced, say=lambda *said: send(said))
    return made.folder


def add_set_here(new: NewSet, into: Path, *, is_replaced: bool, say: Say) -> ModelSet:
    """Create the set in this process, with the manifest's errors as one line.

    Raises:
        ModelSetError: as of :func:`add_set_apart`, except for a crash.
    """
    try:
        return add_set(new, into, is_replaced=is_replaced, say=say)
    except ValidationError as error:
        first = error.errors()[0]
        where, value = ".".join(map(str, first["loc"])) or "set", first["input"]
        shown = f" (given: {value!r})" if isinstance(value, str | int | float) else ""
        raise ModelSetError(f"{where}: {first['msg']}{shown}") from None


@dataclass(frozen=True)
class TriedAnswer:
    """The likeliest class of a photograph."""

    file: str
    index: int
    label: str
    probability: float


@dataclass(frozen=True)
class TriedRange:
    """The answers of a member to pixels of one range, in one order of colours.

    ``is_wanted``: its first layers or its metadata want these; None: they tell nothing.
    """

    member: str
    pixels: str
    how: Normalisation
    is_wanted: bool | None
    answers: tuple[TriedAnswer, ...]


def try_photos_apart(new: NewSet, photos: Sequence[Path]) -> list[TriedRange]:
    """Return :func:`try_photos`, computed in another process: a file may crash what reads it."""
    rows: list[TriedRange] = run_apart(try_photos, new, photos)
    return rows


def try_photos(new: NewSet, photos: Sequence[Path]) -> list[TriedRange]:
    """Return each member's first answers to photographs, by each range and order of colours.

    Raises:
        ModelSetError: there are too many photographs, or a file is no classifier.
        TandemError: a photograph cannot be decoded.
    """
    if len(photos) > MAX_PHOTOS:
        raise ModelSetError(f"--try takes at most {MAX_PHOTOS} photographs, not {len(photos)}")
    contents = []
    for photo in photos:
        with reading(photo):
            contents.append((photo, photo.read_bytes()))
    labels = () if new.labels is None else tuple(read_class_names(new.labels).names)
    return [
        row for name, path in new.members for row in _of_member(new, name, path, labels, contents)
    ]


def _of_member(
    new: NewSet,
    name: str,
    path: Path,
    labels: Sequence[str],
    contents: Sequence[tuple[Path, bytes]],
) -> Iterator[TriedRange]:
    by_unit = _by_range(new, name, path, len(labels), UNIT)
    options, labels = new.options_of(name), labels or by_unit.labels or ()
    images = np.stack(
        [_decoded(*content, options.image(by_unit.form.size)) for content in contents]
    )
    is_grey = by_unit.form.channels == 1
    of_floats = None if is_grey else _run(by_unit)
    for pixels, how in _ranges(by_unit, options.color_order):
        run = of_floats or _run(_by_range(new, name, path, len(labels), how))
        is_wanted = any(map(how.is_close, by_unit.wanted)) if by_unit.wanted else None
        answers = [
            _answer(photo.name, row, labels)
            for (photo, _), row in zip(contents, run(images, how), strict=True)
        ]
        yield TriedRange(name, pixels, how, is_wanted, tuple(answers))


def _by_range(new: NewSet, name: str, path: Path, num_labels: int, how: Normalisation) -> Imported:
    stated = file_options(new, name)
    stated = replace(stated, normalisation=how, pixel_order=how.color_order, is_stated=True)
    return import_file(replace(new, runtimes={}), name, path, num_labels, stated)


def _decoded(photo: Path, content: bytes, image: ImageRecord) -> Pixels:
    try:
        return read_image(content, image.rule)
    except TandemError as error:
        raise ModelSetError(f"--try {photo}: {error}") from error


def _ranges(imported: Imported, order: ColorOrder | None) -> Iterator[tuple[str, Normalisation]]:
    """Yield the usual ranges of pixels in each order of colours; Caffe's networks take BGR."""
    if imported.form.channels == 1:
        names = [name for name, how in CONVENTIONS.items() if len({*how.mean}) == 1]
        yield from (
            (name, usual(name, "RGB")) for name in names[: 1 if imported.takes_integers else 3]
        )
        return
    orders = ORDERS if order is None else (order,)
    names = [*CONVENTIONS][: 1 if imported.takes_integers else None]
    yield from ((name, usual(name, own)) for own in orders for name in names)
    if "BGR" in orders and not imported.takes_integers:
        yield "less Caffe's mean", CAFFE


def _run(imported: Imported) -> Callable[[Pixels, Normalisation], list[Probabilities]]:
    """Return what answers images, uint8 BGR (N, H, W, 3), taken by a normalisation."""
    assert isinstance(imported.network, ov.Model)
    model = imported.network.clone()
    number, is_plain = fixed_batch(model) or 1, imported.form.channels == 1
    takes_pixels = is_plain or imported.takes_integers
    if not takes_pixels:
        model.get_parameters()[0].set_element_type(ov.Type.f32)
        model.validate_nodes_and_infer_types()
    model.reshape([number, *list(model.input().partial_shape)[1:]])
    compiled = compile_with(model, {"INFERENCE_PRECISION_HINT": "f32"})

    def run(images: Pixels, how: Normalisation) -> list[Probabilities]:
        pixels = images if is_plain or how.color_order == "BGR" else images[..., ::-1]
        values = pixels if takes_pixels else how.of(pixels) * np.float32(UNIT.scale[0])
        return [compiled(np.repeat(image[None], number, 0))[0][0] for image in values]

    return run


def _answer(file: str, row: Probabilities, labels: Sequence[str]) -> TriedAnswer:
    best = int(row.argmax())
    label = labels[best] if best < len(labels) else f"class {best}"
    return TriedAnswer(file, best, label, round(float(row[best]), 4))
