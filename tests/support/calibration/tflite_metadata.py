"""Writes TFLite files with metadata by Google's own FlatBuffers builder, and no layers."""

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flatbuffers

NORMALISATION_OPTIONS, IMAGE_PROPERTIES, AXIS_LABELS = 1, 2, 2


def _table(builder: Any, *fields: tuple[int, str, Any]) -> int:
    """Write a table of (place, kind, value): offsets, unsigned 32-bit numbers, or bytes."""
    builder.StartObject(max(place for place, _, _ in fields) + 1)
    for place, kind, value in fields:
        if kind == "offset":
            builder.PrependUOffsetTRelativeSlot(place, value, 0)
        else:
            {"number": builder.PrependUint32Slot, "byte": builder.PrependUint8Slot}[kind](
                place, value, 0
            )
    return int(builder.EndObject())


def _offsets(builder: Any, offsets: Sequence[int]) -> int:
    builder.StartVector(4, len(offsets), 4)
    for offset in reversed(offsets):
        builder.PrependUOffsetTRelative(offset)
    return int(builder.EndVector())


def _floats(builder: Any, values: Sequence[float]) -> int:
    builder.StartVector(4, len(values), 4)
    for value in reversed(values):
        builder.PrependFloat32(value)
    return int(builder.EndVector())


def metadata(
    mean: Sequence[float], scale: Sequence[float], color_space: int, files: Sequence[str]
) -> bytes:
    """Return a buffer of the kind M001: an image input, an output with files of labels."""
    builder = flatbuffers.Builder(0)
    names = [(builder.CreateString(name), AXIS_LABELS) for name in files]
    rows = [_table(builder, (0, "offset", name), (2, "byte", kind)) for name, kind in names]
    labels = _table(builder, (6, "offset", _offsets(builder, rows)))
    options = _table(
        builder, (0, "offset", _floats(builder, mean)), (1, "offset", _floats(builder, scale))
    )
    unit = _table(builder, (0, "byte", NORMALISATION_OPTIONS), (1, "offset", options))
    image = _table(builder, (0, "byte", color_space))
    content = _table(builder, (0, "byte", IMAGE_PROPERTIES), (1, "offset", image))
    units = _offsets(builder, [unit])
    pixels = _table(builder, (3, "offset", content), (4, "offset", units))
    ends = _offsets(builder, [pixels]), _offsets(builder, [labels])
    graph = _table(builder, (2, "offset", ends[0]), (3, "offset", ends[1]))
    builder.Finish(
        _table(builder, (3, "offset", _offsets(builder, [graph]))), file_identifier=b"M001"
    )
    return bytes(builder.Output())


def tflite(
    path: Path,
    mean: Sequence[float] = (127.5,),
    scale: Sequence[float] = (127.5,),
    color_space: int = 1,
    files: dict[str, str] | None = None,
    others: dict[str, str] | None = None,
) -> Path:
    """Write a TFLite file without layers, its metadata, and the archive behind it.

    ``files`` are named as labels in the metadata; ``others`` are in the archive alone.
    """
    files, builder = files or {}, flatbuffers.Builder(0)
    content = builder.CreateByteVector(metadata(mean, scale, color_space, list(files)))
    name = builder.CreateString("TFLITE_METADATA")
    entry = _table(builder, (0, "offset", name), (1, "number", 1))
    builder.StartObject(1)
    empty = builder.EndObject()
    buffers = _offsets(builder, [empty, _table(builder, (0, "offset", content))])
    root = _table(builder, (4, "offset", buffers), (6, "offset", _offsets(builder, [entry])))
    builder.Finish(root, file_identifier=b"TFL3")
    path.write_bytes(bytes(builder.Output()))
    with zipfile.ZipFile(path, "a") as archive:
        for file, text in {**(others or {}), **files}.items():
            archive.writestr(file, text)
    return path
