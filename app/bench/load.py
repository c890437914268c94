"""A load: its target and clients, the photos, and the arrival times of an open loop."""

import glob
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import numpy.typing as npt

from app.bench.client import Target
from app.errors import ConfigError
from models.errors import TandemError
from models.image_files import images_below
from models.image_formats import KINDS

MAX_ARRIVALS = 2_000_000
MAX_PHOTO_BYTES = 512 * 2**20  # of photos held in memory; more are left out


class NothingToClassifyError(TandemError):
    """No image among the given paths."""

    code = "nothing_to_classify"


@dataclass(frozen=True)
class Load:
    """The load of a run: a closed loop with ``clients``, or an open loop with ``rate``."""

    target: Target
    duration_s: float
    clients: int = 0
    rate: float = 0.0
    seed: int = 20

    @property
    def kind(self) -> str:
        return "open" if self.rate else "closed"

    @property
    def offered(self) -> float:
        return self.rate or float(self.clients)


def poisson_arrivals(rate: float, duration_s: float, seed: int) -> npt.NDArray[np.float64]:
    """Return arrival times of a Poisson process at ``rate`` per s, in s from the start, ascending.

    Raises:
        ConfigError: rate or duration is not a positive finite number, or there are too many
            arrivals.

    """
    for name, value in (("rate", rate), ("duration", duration_s)):
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"--{name} is {value}; it must be a number above 0")
    expected = rate * duration_s
    if expected > MAX_ARRIVALS:
        raise ConfigError(
            f"{rate:g} requests/s for {duration_s:g} s are {expected:.0f} requests; "
            f"{MAX_ARRIVALS} is the limit: a lower rate or a shorter time"
        )
    rng = np.random.default_rng(seed)
    num_drawn = math.ceil(expected + 6 * math.sqrt(expected) + 10)
    times = np.cumsum(rng.exponential(1 / rate, num_drawn))
    arrivals: npt.NDArray[np.float64] = times[times < duration_s]
    return arrivals


def find_files(paths: list[str]) -> Iterator[Path]:
    """Yield each file once: as named, every image below a folder, or the matches of a glob."""
    seen: set[Path] = set()
    for text in paths:
        path = Path(text)
        if path.is_dir():
            files = images_below(path)
            if not files:
                raise NothingToClassifyError(f"no {KINDS} in {path}; name another folder")
        elif path.exists():
            files = [path]
        else:
            # The text is a glob, relative or absolute; Path.glob does not accept absolute ones.
            matches = glob.glob(text, recursive=True)  # noqa: PTH207
            files = [Path(match) for match in sorted(matches) if not Path(match).is_dir()]
            if not files:
                raise NothingToClassifyError(f"no such file or folder: {text}")
        yield from (p for p in files if p not in seen and not seen.add(p))  # type: ignore[func-returns-value]


def photos_in(folder: Path) -> list[bytes]:
    """Read the images of a folder, by name, until ``MAX_PHOTO_BYTES`` are read.

    Raises:
        NothingToClassifyError: the folder has no images.
        ConfigError: an image cannot be read.

    """
    bodies: list[bytes] = []
    total = 0
    for path in find_files([str(folder)]):
        try:
            body = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        total += len(body)
        if bodies and total > MAX_PHOTO_BYTES:
            break
        bodies.append(body)
    return bodies


def drawn_photos(num_photos: int = 16, width: int = 500, height: int = 375) -> list[bytes]:
    """Generate JPEGs of the usual size of ImageNet's photos; their contents are meaningless."""
    rng = np.random.default_rng(20)
    bodies = []
    for _ in range(num_photos):
        coarse = rng.integers(0, 256, (12, 16, 3), np.uint8)
        smooth = cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)
        grainy = cv2.add(smooth, rng.integers(0, 24, smooth.shape, np.uint8))
        bodies.append(cv2.imencode(".jpg", grainy, [cv2.IMWRITE_JPEG_QUALITY, 90])[1].tobytes())
    return bodies
