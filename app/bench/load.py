"""A load: who sends what to which service, the photos, and when an open loop's requests arrive."""

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

MAX_ARRIVALS = 2_000_000
MAX_PHOTO_BYTES = 512 * 2**20  # of photos held in memory; more are left out


class NothingToClassifyError(TandemError):
    """No image among the given paths."""

    code = "nothing_to_classify"


@dataclass(frozen=True)
class Load:
    """One run: ``clients`` of a closed loop, or ``rate`` of an open one."""

    target: Target
    duration_s: float
    clients: int = 0
    rate: float = 0.0
    seed: int = 20

    @property
    def kind(self) -> str:
        """Which of the two."""
        return "open" if self.rate else "closed"

    @property
    def offered(self) -> float:
        """The rate, or the number of clients."""
        return self.rate or float(self.clients)


def poisson_arrivals(rate: float, duration_s: float, seed: int) -> npt.NDArray[np.float64]:
    """Return the times (in s from the start, rising) of independent arrivals at ``rate`` per s.

    Raises:
        ConfigError: rate or duration is no positive finite number, or there would be too many.

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
    """Yield each file once: as named, every image below a folder, or what a glob matches."""
    seen: set[Path] = set()
    for text in paths:
        path = Path(text)
        if path.is_dir():
            files = images_below(path)
            if not files:
                raise NothingToClassifyError(f"no JPEG, PNG or WebP in {path}; name another folder")
        elif path.exists():
            files = [path]
        else:
            # The text is the user's glob, relative or absolute: Path.glob takes no absolute one.
            matches = glob.glob(text, recursive=True)  # noqa: PTH207
            files = [Path(match) for match in sorted(matches) if not Path(match).is_dir()]
            if not files:
                raise NothingToClassifyError(f"no such file or folder: {text}")
        yield from (p for p in files if p not in seen and not seen.add(p))  # type: ignore[func-returns-value]


def photos_in(folder: Path) -> list[bytes]:
    """Read the images of a folder in the order of their names, as many as memory is set aside for.

    Raises:
        NothingToClassifyError: there is none.
        ConfigError: one cannot be read.

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
    """Draw JPEGs of the size that ImageNet's photos have; their contents tell nothing."""
    rng = np.random.default_rng(20)
    bodies = []
    for _ in range(num_photos):
        coarse = rng.integers(0, 256, (12, 16, 3), np.uint8)
        smooth = cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)
        grainy = cv2.add(smooth, rng.integers(0, 24, smooth.shape, np.uint8))
        bodies.append(cv2.imencode(".jpg", grainy, [cv2.IMWRITE_JPEG_QUALITY, 90])[1].tobytes())
    return bodies
