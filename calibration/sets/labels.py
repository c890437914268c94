"""Reads the labels and class ids of a set from files, and gives an existing set other ones.

Labels may stand in a network's metadata too. ONNX has them among its properties (Ultralytics'
``names`` are a Python dictionary, which is read as a literal), IR in its ``rt_info``, TFLite in a
text file behind the network (a ZIP archive). TFLite's own metadata (a FlatBuffer, ``M001``: schema
``metadata_schema.fbs`` of tflite-support) names that file, and has the mean and scale of pixels.
"""

import re
import struct
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import openvino as ov

from calibration.label_files import MAX_BYTES, ClassNames, class_names_of, read_class_names, text_of
from calibration.sets.transaction import Staging, change
from models.errors import ModelSetError
from models.manifest import Manifest, read_manifest
from models.model_set import ModelSet
from models.record import FileRecord

Say = Callable[[str, str, str | None], None]  # takes a file or member, facts and possible problem
MADE_BY = "tandem models labels"
# What was measured by the classes' order.
OF_ORDER = {"sure": None, "answer_set": None, "trust": (), "fast_plan": None}

KEYS = ("names", "labels", "id2label", "class_names", "classes", "categories", "label_names")
SECTIONS = ("framework", "model_info")  # of rt_info: ONNX's properties, and Model API's notes
PREFIX = "model_info "  # of the same notes in ONNX
LABEL_FILES = "label_files"  # of the notes: the files behind a TFLite network that hold labels
TFLITE, TFLITE_KIND, METADATA_KIND = ".tflite", b"TFL3", b"M001"
# Places of fields, and values, in the schemas of TFLite's networks and of their metadata.
BUFFERS, METADATA, SUBGRAPHS, INPUTS, OUTPUTS = 4, 6, 3, 2, 3
CONTENT, UNITS, TENSOR_FILES, FILE_KIND = 3, 4, 6, 2
NORMALISATION, IMAGE, RGB, AXIS_LABELS = 1, 2, 1, 2
NUM_SHOWN = 3


@dataclass(frozen=True)
class SetClasses:
    """The labels of a set, and its class ids, in the networks' order."""

    labels: Sequence[str]
    ids: Sequence[str] | None

    @classmethod
    def read(cls, labels: Path, class_ids: Path | None, say: Say) -> "SetClasses":
        """Read both files; ids may stand in that of the labels.

        Raises :class:`ModelSetError` if a file cannot be read, or their numbers of classes differ.
        """
        names = read_names(labels, say)
        return cls(names.names, names.ids).with_ids(class_ids, labels, say)

    def with_ids(self, class_ids: Path | None, labels: Path | str, say: Say) -> "SetClasses":
        """Return these labels with the ids of a file, if there is one; ``labels`` names them."""
        ids = self.ids
        if class_ids is not None:
            own = read_names(class_ids, say)
            ids = own.ids or own.names
        if ids is not None and not len(ids) == len(set(ids)) == len(self.labels):
            raise ModelSetError(
                f"{class_ids or labels} has {len(ids)} class ids, {len(set(ids))} different ones, "
                f"for {len(self.labels)} classes"
            )
        return SetClasses(self.labels, ids)

    def written(self, staging: Staging) -> dict[str, FileRecord]:
        """Write the files, and return the manifest's fields."""
        files = {"labels": staging.text("labels.txt", _lines(self.labels))}
        if self.ids is not None:
            files["class_ids"] = staging.text("class_ids.txt", _lines(self.ids))
        return files


def read_names(path: Path, say: Say) -> ClassNames:
    """Read class names; say how, if it is not a plain list."""
    classes = read_class_names(path)
    of_ids = () if classes.ids is None else (f"they have ids, as {classes.ids[0]}",)
    if notes := (*classes.notes, *of_ids):
        ends = f"{classes.names[0]} to {classes.names[-1]}"
        say(path.name, f"{len(classes.names)} classes, {ends}; {'; '.join(notes)}", None)
    return classes


def change_classes(
    model_set: ModelSet, labels: Path | None, class_ids: Path | None, say: Say
) -> ModelSet:
    """Give a set other labels, other class ids, or both; the networks stay.

    Raises :class:`ModelSetError` if their number is not the set's, or the set has ids and gets the
    same labels in another order without others.
    """
    before = SetClasses(model_set.labels, model_set.class_ids)
    if labels is None:
        now = before.with_ids(class_ids, model_set.name, say)
    else:
        now = SetClasses.read(labels, class_ids, say)
        if len(now.labels) != len(before.labels):
            raise ModelSetError(
                f"{labels} has {len(now.labels)} labels; {model_set.name} has "
                f"{len(before.labels)} classes, in the networks' order"
            )
    is_moved = now.labels != before.labels and sorted(now.labels) == sorted(before.labels)
    if now.ids is None and before.ids is not None:
        if is_moved:
            raise ModelSetError(
                f"{labels} has the labels of {model_set.name} in another order, which its class "
                "ids do not follow: give these too, --class-ids FILE"
            )
        now = SetClasses(now.labels, before.ids)
    folder = model_set.folder
    with change(folder, MADE_BY) as staging:
        if read_manifest(folder) != model_set.manifest:
            raise ModelSetError(f"{folder} was changed meanwhile: nothing is written; try again")
        staging.move_in(_renamed(model_set.manifest, now.written(staging), before, now, is_moved))
    return ModelSet(folder, read_manifest(folder))


def _renamed(
    manifest: Manifest,
    files: dict[str, FileRecord],
    before: SetClasses,
    now: SetClasses,
    is_moved: bool,
) -> Manifest:
    """Return the manifest with other files of classes.

    Records hold on if ids say that the classes are the same, or the labels do and had no ids.
    """
    renamed = manifest.model_copy(update={**files, **(OF_ORDER if is_moved else {})})
    plan = renamed.fast_plan
    if plan is not None and plan.made_for == manifest.plan_key(plan.precision):
        plan = plan.model_copy(update={"made_for": renamed.plan_key(plan.precision)})
    is_same = list(now.labels) == list(before.labels) and before.ids is None
    is_same |= before.ids is not None and list(now.ids or ()) == list(before.ids)
    accuracy = tuple(
        record.model_copy(update={"conditions": renamed.conditions})
        if is_same and record.conditions == manifest.conditions
        else record
        for record in manifest.accuracy
    )
    return renamed.model_copy(update={"fast_plan": plan, "accuracy": accuracy})


def _lines(names: Sequence[str]) -> str:
    return "".join(f"{name}\n" for name in names)


def notes_of(model: ov.Model, path: Path | None = None) -> dict[str, str]:
    """Return what a file's metadata says of its network, as text by key.

    TFLite's, which OpenVINO does not read, is read from ``path``, with the keys of Model API.
    """
    info = model.get_rt_info()
    sections = [info[name] for name in SECTIONS if name in info]
    values = [getattr(section, "value", section) for section in sections]
    notes = {
        key: str(getattr(value, "value", value))
        for section in values
        if isinstance(section, dict)
        for key, value in section.items()
    }
    return notes if path is None or path.suffix != TFLITE else _tflite_notes(path) | notes


@dataclass(frozen=True)
class _Table:
    """A table of a FlatBuffer; its fields are known by their places in the schema."""

    data: bytes
    at: int

    @classmethod
    def root(cls, data: bytes, kind: bytes) -> "_Table":
        if data[4:8] != kind:
            raise ValueError(f"no {kind.decode()}")
        return cls(data, _number("I", data, 0))

    @cached_property
    def _offsets(self) -> Sequence[int]:
        table = self.at - _number("i", self.data, self.at)
        return struct.unpack_from(f"<{_number('H', self.data, table) // 2}H", self.data, table)[2:]

    def _field(self, place: int) -> int | None:
        offset = self._offsets[place] if place < len(self._offsets) else 0
        return self.at + offset if offset else None

    def number(self, place: int, kind: str = "B") -> int:
        return 0 if (at := self._field(place)) is None else _number(kind, self.data, at)

    def _follow(self, at: int) -> int:
        return at + _number("I", self.data, at)

    def table(self, place: int) -> "_Table | None":
        return None if (at := self._field(place)) is None else _Table(self.data, self._follow(at))

    def _items(self, place: int, size: int) -> tuple[int, int]:
        """Return where a vector's items begin, and how many there are."""
        if (at := self._field(place)) is None:
            return 0, 0
        at = self._follow(at)
        if (count := _number("I", self.data, at)) * size > len(self.data):
            raise ValueError(f"{count} items")
        return at + 4, count

    def tables(self, place: int) -> list["_Table"]:
        at, count = self._items(place, 4)
        return [_Table(self.data, self._follow(at + 4 * number)) for number in range(count)]

    def bytes(self, place: int) -> bytes:
        at, count = self._items(place, 1)
        return self.data[at : at + count]

    def text(self, place: int) -> str:
        return self.bytes(place).decode("utf-8")

    def floats(self, place: int) -> tuple[float, ...]:
        at, count = self._items(place, 4)
        return struct.unpack_from(f"<{count}f", self.data, at)


def _number(kind: str, data: bytes, at: int) -> int:
    if at < 0:
        raise ValueError(f"a place before the file: {at}")
    number: int = struct.unpack_from(f"<{kind}", data, at)[0]
    return number


def _tflite_notes(path: Path) -> dict[str, str]:
    """Return what TFLite's metadata says of the first input and output; empty without any."""
    try:
        network = _Table.root(path.read_bytes(), TFLITE_KIND)
        buffers = network.tables(BUFFERS)
        notes = {own.text(0): own.number(1, "I") for own in network.tables(METADATA)}
        about = _Table.root(buffers[notes["TFLITE_METADATA"]].bytes(0), METADATA_KIND)
        graph = about.tables(SUBGRAPHS)[0]
        return _input_notes(graph.tables(INPUTS)) | _label_files(graph.tables(OUTPUTS))
    except (OSError, ValueError, LookupError, struct.error):  # none, damaged, or of another version
        return {}


def _input_notes(inputs: Sequence[_Table]) -> dict[str, str]:
    notes = dict[str, str]()
    for image in inputs[:1]:
        units = [u.table(1) for u in image.tables(UNITS) if u.number(0) == NORMALISATION]
        for unit in filter(None, units[:1]):
            rows = zip(("mean_values", "scale_values"), map(unit.floats, (0, 1)), strict=True)
            notes |= {key: " ".join(f"{value:g}" for value in row) for key, row in rows if row}
        content = image.table(CONTENT)
        properties = content and content.number(0) == IMAGE and content.table(1)
        if properties and properties.number(0) == RGB:
            notes["reverse_input_channels"] = "True"
    return notes


def _label_files(outputs: Sequence[_Table]) -> dict[str, str]:
    files = [file for output in outputs[:1] for file in output.tables(TENSOR_FILES)]
    names = [file.text(0) for file in files if file.number(FILE_KIND) == AXIS_LABELS]
    return {LABEL_FILES: "\n".join(names)} if names else {}


def own_labels(notes: Mapping[str, str], path: Path) -> tuple[str, ...] | None:
    """Return the labels in a file's metadata, in the network's order; None without any.

    ``notes`` are the metadata of ``path`` by key, as text.
    """
    notes = {key.removeprefix(PREFIX): text for key, text in notes.items()}
    texts = [notes[key] for key in KEYS if notes.get(key, "").strip()]
    if path.suffix == TFLITE:
        texts += _archived(path, notes.get(LABEL_FILES, "").split("\n"))
    for text in texts:
        try:
            return tuple(class_names_of(_as_list(text), path).names)
        except ModelSetError:  # something else has that name
            continue
    return None


def _as_list(text: str) -> str:
    """Return labels that stand on one line, by commas or blanks, a line each."""
    text = text.strip()
    if "\n" in text or text.startswith(("{", "[", "(")):
        return text
    if "," in text:
        return re.sub(r"\s*,\s*", "\n", text)
    return "\n".join(word.replace("_", " ") for word in text.split())  # Model API's


def _archived(path: Path, first: Sequence[str]) -> list[str]:
    """Return the texts in the archive behind a TFLite network, those of labels first."""
    try:
        with zipfile.ZipFile(path) as archive:
            texts = [
                info
                for info in archive.infolist()
                if info.filename.endswith((".txt", ".json", ".csv")) or info.filename in first
                if info.file_size <= MAX_BYTES
            ]
            names = {name: place for place, name in enumerate(first)}
            texts.sort(
                key=lambda info: (
                    names.get(info.filename, len(first)),
                    "label" not in info.filename,
                )
            )
            return [text_of(archive.read(info), path) for info in texts]
    except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError, ModelSetError):
        return []  # most have no archive


def label_doubt(labels: Sequence[str], own: Sequence[str] | None) -> str | None:
    """Return how labels differ from those in a network's metadata; None if they do not."""
    if own is None:
        return None
    if len(own) != len(labels):
        return f"its metadata names {len(own)} classes, from {own[0]} to {own[-1]}"
    pairs = zip(labels, own, strict=True)
    others = [n for n, pair in enumerate(pairs) if not _plain(pair[0]) & _plain(pair[1])]
    if not others:
        return None
    shown = ", ".join(f"{n} is {own[n]!r}, not {labels[n]!r}" for n in others[:NUM_SHOWN])
    is_moved = {frozenset(_plain(name)) for name in labels} == {
        frozenset(_plain(name)) for name in own
    }
    how = "the same labels in another order" if is_moved else "other labels"
    return (
        f"its metadata has {how} for {len(others)} of {len(labels)} classes: {shown}. Leave "
        "--labels out to take these"
    )


def _plain(label: str) -> set[str]:
    """Return the names that a label has: "Tench, Tinca_tinca" has two."""
    return {re.sub(r"[\W_]+", " ", name).strip().casefold() for name in label.split(",")}
