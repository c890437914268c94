"""Draws the calibration and the validation images, and records their hashes.

Sets without other images are calibrated with photographs in Python packages. scikit-image's test
photographs come from its wheel. scikit-learn's two are installed with NNCF. Each of these few gives
many images: random squares, mirrored, with changed colours and brightness. INT8 only needs the
activations' ranges, which are similar for all photographs.
"""

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

import cv2
import numpy as np

from calibration.datasets import LabelledImage, file_hashes, find_images, read_dataset
from calibration.quantization.quantize import Labelled
from calibration.sets.files import ReportProgress
from calibration.sets.packaged import Wheel, WheelSource, fetch_wheel, read_from
from models.errors import ImageError, ModelSetError
from models.image import ImageInputs
from models.model_set import ModelSet
from models.network import Pixels
from models.own_functions import inputs_of

SEED = 20
# With fewer held-out images, chance alone moves top-1 by more than half a percentage point.
MIN_VALIDATION = 400
MAX_VALIDATION = 2000
MIN_COMPARED, MAX_COMPARED = 60, 400  # images without labels
SOURCE = "packaged photographs"  # the name in manifests
SCIKIT_IMAGE = Wheel(
    "scikit-image",
    "0.26.0",
    "74aa5518ccea28121f57a95374581d3b979839adc25bb03f289b1bc9b99c58af",
    13_711_217,
    is_of_platform=True,
)
OF_SCIKIT_IMAGE = (
    *("astronaut.png", "brick.png", "camera.png", "chelsea.png", "coffee.png", "coins.png"),
    *("grass.png", "gravel.png", "hubble_deep_field.jpg", "ihc.png", "moon.png"),
    *("motorcycle_left.png", "motorcycle_right.png", "retina.jpg", "rocket.jpg"),
)
OF_SCIKIT_LEARN = ("china.jpg", "flower.jpg")
LEAST_SHARE = 0.35  # of a square's side to the photograph's shorter side
BRIGHTNESS, COLOR = 0.1, 0.05  # the largest change of all channels together, and of each separately


@dataclass
class Chosen:
    """Images drawn from a folder: pixels as in ImageInputs, and the files used or skipped."""

    pixels: list[Pixels] = field(default_factory=list)
    paths: list[Path] = field(default_factory=list)
    hashes: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)


def draw_images(
    folder: Path, num_images: int, inputs: ImageInputs, is_asked: bool = False
) -> Chosen:
    """Draw ``num_images`` readable images at random, with seed 20, so that runs are repeatable.

    Raises :class:`ModelSetError` if the folder has fewer. With ``is_asked`` the message says that
    the user chose the number.
    """
    paths = find_images(folder)
    random.Random(SEED).shuffle(paths)
    chosen = Chosen()
    for path in paths:
        if len(chosen.pixels) == num_images:
            break
        try:
            data = path.read_bytes()
            chosen.pixels.append(inputs.first_view(data))
        except (ImageError, OSError) as error:
            chosen.unreadable.append(f"{path}: {error}")
            continue
        chosen.paths.append(path)
        chosen.hashes.append(hashlib.sha256(data).hexdigest())
    if len(chosen.pixels) < num_images:
        bad = f" ({len(chosen.unreadable)} more cannot be read)" if chosen.unreadable else ""
        source = "asked for" if is_asked else "the set's quantization.subset_size"
        raise ModelSetError(
            f"{folder} has {len(chosen.pixels)} images{bad}; {num_images} are {source}. Give more, "
            f"or --subset-size {max(1, len(chosen.pixels))} (under 100, INT8 may lose accuracy)"
        )
    return chosen


@dataclass(frozen=True)
class HeldOut:
    """Labelled images that calibration does not use, to measure the drop; or why there are none.

    ``labelled`` has pixels as in :class:`ImageInputs`, or is None. ``description`` names the
    images, or says why there are none.
    """

    description: str
    labelled: Labelled | None = None
    hashes: tuple[str, ...] = ()
    dataset: str = ""
    unlabelled: Pixels = field(default_factory=lambda: np.empty(0, np.uint8))  # if not labelled


def held_out(
    images: Path | None, validation: Path | None, model_set: ModelSet, calibration: Chosen
) -> HeldOut:
    """Read the images of ``validation``, or else those of ``images`` that calibration left.

    The latter are used only if they are labelled and enough, without copies of calibration images.
    At most 2000 are used, since they are held in memory. Raises :class:`ModelSetError` if
    ``validation`` cannot be used, or has calibration images.
    """
    if model_set.manifest.is_multi_label and validation is not None:
        raise ModelSetError(
            f"--validation: {model_set.name} is multi-label, and layers are taken back to float by "
            "top-1, which it has not; leave it out, and let tandem evaluate measure what INT8 costs"
        )
    if model_set.manifest.is_multi_label:
        return HeldOut(f"none: {model_set.name} is multi-label; tandem evaluate measures it")
    if validation is not None:
        dataset = read_dataset(validation, model_set)
        taken = set[Path]()
    elif images is None:
        return HeldOut("nothing: packaged photographs have no labels of this set")
    else:
        try:
            dataset = read_dataset(images, model_set)
        except ModelSetError as error:
            return HeldOut(f"nothing: {images} is no labelled dataset of this set: {error.message}")
        taken = {path.resolve() for path in calibration.paths}
    left = [image for image in dataset.images if image.path.resolve() not in taken]
    if len(left) > MAX_VALIDATION:
        left = random.Random(SEED).sample(left, MAX_VALIDATION)
    used = set(calibration.hashes)
    copies = {path for path, value in file_hashes(left).items() if value in used}
    if validation is not None and copies:
        raise ModelSetError(
            f"--validation {validation}: {len(copies)} of {len(left)} images calibrate INT8 too, "
            f"as {min(copies)}: the drop on them proves nothing. Give other images, or leave "
            "--validation out, and what calibration leaves of --images measures the drop"
        )
    left = [image for image in left if image.path not in copies]
    if validation is None and len(left) < MIN_VALIDATION:
        return HeldOut(f"{len(left)} images are left for it, {MIN_VALIDATION} are needed")
    labelled, hashes = _read(left, inputs_of(model_set.manifest))
    description = f"{len(hashes)} images of {validation or images}"
    return HeldOut(description, labelled, tuple(hashes), dataset.name)


def with_unlabelled(
    held: HeldOut, images: Path | None, inputs: ImageInputs, calibration: Chosen
) -> HeldOut:
    """Return images to compare float and INT8 on without labels: a folder's that are left.

    With few left, and of packaged photographs, they are those that calibrated INT8.
    """
    left = [] if images is None else sorted({*find_images(images)} - {*calibration.paths})
    left = random.Random(SEED).sample(left, min(len(left), MAX_COMPARED))
    pixels = []
    for path in left if len(left) >= MIN_COMPARED else []:
        with suppress(ImageError, OSError):
            pixels.append(inputs.first_view(path.read_bytes()))
    of = "photographs that calibration left" if pixels else "calibration images"
    if images is None:
        of = "crops of packaged photographs"
    return replace(held, dataset=of, unlabelled=np.stack(pixels or calibration.pixels))


def _read(images: Sequence[LabelledImage], inputs: ImageInputs) -> tuple[Labelled, list[str]]:
    pixels, truth, hashes = [], [], []
    for image in images:
        try:
            data = image.path.read_bytes()
            pixels.append(inputs.first_view(data))
        except (ImageError, OSError):
            continue  # evaluate lists unreadable files; here they are skipped
        truth.append(image.class_index)
        hashes.append(hashlib.sha256(data).hexdigest())
    if not pixels:
        raise ModelSetError(f"none of {len(images)} validation images can be read")
    return Labelled(np.stack(pixels), np.array(truth, np.int64)), hashes


def packaged_images(
    num_images: int,
    inputs: ImageInputs,
    source: WheelSource,
    report: ReportProgress = lambda _, __: None,
) -> Chosen:
    """Return squares of the photographs as the members' inputs, the same each time.

    Raises:
        DownloadError: scikit-image's wheel cannot be downloaded.
        ModelSetError: a photograph is missing or cannot be read.
    """
    files = list(_files(fetch_wheel(SCIKIT_IMAGE, source, report)))
    photographs = list[Pixels]()
    for name, data in files:
        pixels = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)  # (H, W, 3) BGR
        if pixels is None:
            problem = f"{name} is no picture: delete scikit-image's wheel, and fetch it again"
            raise ModelSetError(problem)
        photographs.append(np.asarray(pixels, np.uint8))
    chosen = Chosen(hashes=[sha256(data).hexdigest() for _, data in files])
    generator = np.random.default_rng(SEED)
    for place in range(num_images):
        square = _square(photographs[place % len(photographs)], generator)
        _, encoded = cv2.imencode(".png", square)
        chosen.pixels.append(inputs.first_view(encoded.tobytes()))
    return chosen


def _files(wheel: Path) -> Iterator[tuple[str, bytes]]:
    for name in OF_SCIKIT_IMAGE:
        yield name, read_from(wheel, f"skimage/data/{name}")
    spec = find_spec("sklearn")
    for name in OF_SCIKIT_LEARN:
        path = Path((spec and spec.origin) or "").parent / "datasets" / "images" / name
        try:
            yield name, path.read_bytes()
        except OSError as error:
            raise ModelSetError(
                f"scikit-learn's {name} cannot be read: {error.strerror}; NNCF installs it: pip "
                "install --force-reinstall scikit-learn, or give --images"
            ) from error


def _square(photograph: Pixels, generator: np.random.Generator) -> Pixels:
    """Draw a square: uint8 (S, S, 3) BGR."""
    height, width = photograph.shape[:2]
    side = int(min(height, width) * generator.uniform(LEAST_SHARE, 1))
    top, left = generator.integers(height - side + 1), generator.integers(width - side + 1)
    square = photograph[top : top + side, left : left + side]
    if generator.random() < 0.5:
        square = square[:, ::-1]
    gain = generator.uniform(1 - BRIGHTNESS, 1 + BRIGHTNESS)
    gains = gain * generator.uniform(1 - COLOR, 1 + COLOR, 3)
    return np.clip(np.rint(square * gains), 0, 255).astype(np.uint8)
