"""Creates a model set from existing classifiers: ONNX, OpenVINO IR, TFLite or PyTorch files.

It does so in a process of its own, since a damaged file can crash the library that reads it. For
example, OpenVINO 2026.4 crashes on a convolution without weights.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from calibration.label_files import read_class_names
from calibration.sets.ending import set_task
from calibration.sets.import_network import Imported
from calibration.sets.importing import STATE, import_member, import_weights
from calibration.sets.labels import Say, SetClasses
from calibration.sets.options import ClassMap, FileOptions, MemberOptions
from calibration.sets.transaction import Staging, check_free, create
from models.child_process import OUT_OF_MEMORY, ChildDiedError, Send, last_words, run_apart
from models.ensemble import DEFAULT_THRESHOLD
from models.errors import ModelSetError
from models.image import SCALED, Size, size_text
from models.manifest import MAX_MEMBERS, Manifest, MemberRecord, Network, read_manifest
from models.model_set import PARTIAL_SUFFIX, ModelSet
from models.own_functions import load_function, tried_views
from models.record import FileRecord, Precision, RuntimeName, Task, sha256_of

NOT_YET = FileRecord(path="not-written-yet", sha256="0" * 64)
CLEAN_UP_S = 60.0  # after Ctrl-C: removing a staged set waits until a runtime's call returns


@dataclass(frozen=True)
class NewSet:
    """The files and options of a new set; a member may have a float and an INT8 file."""

    name: str
    members: Sequence[tuple[str, Path]]
    labels: Path
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
    classes = SetClasses.read(new.labels, new.class_ids, say)
    labels, ids = classes.labels, classes.ids
    imported = [_imported(new, name, path, len(labels), ids) for name, path in new.members]
    for added in imported:
        say(added.name, f"{added.imported.facts}; {_resizing(new, added)}", added.imported.doubt)
    task = set_task({f"{added.name} ({added.path})": added.imported.task for added in imported})
    if new.threshold is not None and task != "multi_label":
        raise ModelSetError(
            f"--threshold {new.threshold:g} is of multi-label sets, and these networks' classes "
            "exclude each other (none ends in a sigmoid): leave it out, or say --task multi_label"
        )
    _check_alike(imported, len(labels), new.labels)
    planned = _planned(new, imported, len(labels), task)
    if (function := load_function(planned.preprocess, "preprocess")) is not None:
        tried_views(function, planned.inputs)
    folder = into / planned.name
    with create(folder, is_replaced=is_replaced, made_by="tandem models add") as staging:
        update = {
            **classes.written(staging),
            "members": _members(planned, imported, staging),
        }
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


def _imported(
    new: NewSet, name: str, path: Path, num_labels: int, ids: Sequence[str] | None
) -> _Member:
    """Import a member's file; its class ids are mapped to the set's, ``ids``, if there are any."""
    options, classes = new.options_of(name), None
    if ids is not None and (own := new.member_class_ids.get(name)) is not None:
        of_member = read_class_names(own)
        classes = ClassMap(tuple(of_member.ids or of_member.names), tuple(ids), str(own))
    runtime = new.runtimes.get(name, "openvino")
    how = FileOptions(
        options.input_size,
        options.normalisation,
        options.outputs or "auto",
        options.layout,
        options.color_order,
        classes,
        new.task,
    )
    if path.suffix == STATE:
        whose = new.architectures.get(name)
        return _Member(name, path, import_weights(path, whose, num_labels, runtime, how))
    return _Member(name, path, import_member(path, runtime, how, is_trusted=new.is_trusted))


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


def _check_alike(imported: Sequence[_Member], num_labels: int, labels: Path) -> None:
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
