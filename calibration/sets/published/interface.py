"""The sources of published weights, and what comes with them, of torchvision as of timm."""

from dataclasses import dataclass
from pathlib import Path

from calibration.sets.fold import Normalisation, Triple
from models.image_record import ImageRecord
from models.store_files import HUB


@dataclass(frozen=True)
class WeightsSource:
    """The places that weight files are taken from."""

    cache_dir: Path  # downloads go here and stay
    weights_dir: Path | None = None  # files fetched elsewhere; nothing is downloaded
    mirror: str | None = None  # base URL in place of torchvision's publisher's
    hub: str = HUB  # the Hugging Face hub, or what answers as it does: timm's networks


@dataclass(frozen=True)
class WeightsFile:
    """A local file of weights, and its origin for the manifest."""

    path: Path
    origin: str


@dataclass(frozen=True)
class Input:
    """The preprocessing of pictures that a network's weights were trained with."""

    image: ImageRecord
    normalisation: Normalisation


def on_pixels(mean: tuple[float, ...], std: tuple[float, ...]) -> Normalisation:
    """Convert three means and deviations of values 0..1, as publishers state them, to 0..255."""
    return Normalisation(_triple(mean), _triple(std))


def _triple(values: tuple[float, ...]) -> Triple:
    red, green, blue = (round(255 * float(value), 4) for value in values)
    return red, green, blue
