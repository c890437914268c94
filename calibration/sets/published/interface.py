"""The interface of published networks that ``tandem models fetch`` uses."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from calibration.sets.download import ReportProgress
from calibration.sets.fold import Normalisation, Triple
from models.image_record import ImageRecord

HUB = "https://huggingface.co"


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


class Published(Protocol):
    """A network of a publisher's, with the weights and the metadata that go with it."""

    @property
    def name(self) -> str:
        """The member's name."""

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of its classes, in the order of its outputs."""

    @property
    def input(self) -> Input:
        """The preprocessing in the weights' metadata.

        Raises:
            ModelSetError: tandem does not support that preprocessing.

        """

    def fetch(self, source: WeightsSource, report: ReportProgress) -> WeightsFile:
        """Return the weights after checking their hash.

        Raises:
            DownloadError: they cannot be downloaded, or differ from the published ones.

        """

    def build(self, path: Path) -> torch.nn.Module:
        """Return the network with these weights: float32 (N, 3, H, W) RGB to logits (N, C).

        Raises:
            ModelSetError: the file does not hold weights of this network.

        """


def on_pixels(mean: tuple[float, ...], std: tuple[float, ...]) -> Normalisation:
    """Convert three means and deviations of values 0..1, as publishers state them, to 0..255."""
    return Normalisation(_triple(mean), _triple(std))


def _triple(values: tuple[float, ...]) -> Triple:
    red, green, blue = (round(255 * float(value), 4) for value in values)
    return red, green, blue
