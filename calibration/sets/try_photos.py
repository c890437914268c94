"""Answers of networks to photographs by each usual range of pixels, for a person to choose.

``tandem models add --try PHOTO`` prints them and makes no set. A network is imported once, and gets
floats: each range of pixels is computed here. OpenVINO runs it, whatever the member's runtime is.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import openvino as ov

from calibration.label_files import read_class_names
from calibration.sets.add_set import NewSet, file_options, import_file
from calibration.sets.import_network import Imported
from calibration.sets.input import ColorOrder, Normalisation
from calibration.sets.input_range import CAFFE, CONVENTIONS, ORDERS, usual
from models.child_process import run_apart
from models.ensemble import Probabilities
from models.errors import ModelSetError, TandemError, reading
from models.image import read_image
from models.network import Pixels
from models.openvino_network import compile_with, fixed_batch
from models.record import ImageRecord

MAX_PHOTOS = 16
UNIT = usual("0 to 1", "BGR")  # by which it is imported: no colours change places


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
    by_unit = _imported(new, name, path, len(labels), UNIT)
    options, labels = new.options_of(name), labels or by_unit.labels or ()
    images = np.stack(
        [_decoded(*content, options.image(by_unit.form.size)) for content in contents]
    )
    is_grey = by_unit.form.channels == 1
    of_floats = None if is_grey else _run(by_unit)
    for pixels, how in _ranges(by_unit, options.color_order):
        run = of_floats or _run(_imported(new, name, path, len(labels), how))
        is_wanted = any(map(how.is_close, by_unit.wanted)) if by_unit.wanted else None
        answers = [
            _answer(photo.name, row, labels)
            for (photo, _), row in zip(contents, run(images, how), strict=True)
        ]
        yield TriedRange(name, pixels, how, is_wanted, tuple(answers))


def _imported(new: NewSet, name: str, path: Path, num_labels: int, how: Normalisation) -> Imported:
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
