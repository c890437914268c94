"""Reads the class names that a network's file has in its metadata, and compares them with others.

ONNX has them among its properties (Ultralytics' ``names`` are a Python dictionary, which is read
as a literal), IR in its ``rt_info``, TFLite in a text file behind the network (a ZIP archive).
"""

import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import openvino as ov

from calibration.label_files import MAX_BYTES, class_names_of, text_of
from models.errors import ModelSetError

KEYS = ("names", "labels", "id2label", "class_names", "classes", "categories", "label_names")
SECTIONS = ("framework", "model_info")  # of rt_info: ONNX's properties, and Model API's notes
PREFIX = "model_info "  # of the same notes in ONNX
NUM_SHOWN = 3


def notes_of(model: ov.Model) -> dict[str, str]:
    """Return what a file's metadata says of its network, as text by key."""
    info = model.get_rt_info()
    sections = [info[name] for name in SECTIONS if name in info]
    values = [getattr(section, "value", section) for section in sections]
    return {
        key: str(getattr(value, "value", value))
        for section in values
        if isinstance(section, dict)
        for key, value in section.items()
    }


def own_labels(notes: Mapping[str, str], path: Path) -> tuple[str, ...] | None:
    """Return the labels in a file's metadata, in the network's order; None without any.

    ``notes`` are the metadata of ``path`` by key, as text.
    """
    notes = {key.removeprefix(PREFIX): text for key, text in notes.items()}
    texts = [notes[key] for key in KEYS if notes.get(key, "").strip()]
    if path.suffix == ".tflite":
        texts += _archived(path)
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


def _archived(path: Path) -> list[str]:
    """Return the texts in the archive behind a TFLite network, those of labels first."""
    try:
        with zipfile.ZipFile(path) as archive:
            texts = [
                info
                for info in archive.infolist()
                if info.filename.endswith((".txt", ".json")) and info.file_size <= MAX_BYTES
            ]
            texts.sort(key=lambda info: "label" not in info.filename)
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
