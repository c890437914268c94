"""What ``tandem models fetch`` asks of a publisher's network, whoever the publisher is."""

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
    """Where the weight files come from."""

    cache_dir: Path  # downloads go here and stay
    weights_dir: Path | None = None  # files fetched elsewhere; nothing is downloaded
    mirror: str | None = None  # base URL in place of torchvision's publisher's
    hub: str = HUB  # the Hugging Face hub, or what answers as it does: timm's networks


@dataclass(frozen=True)
class WeightsFile:
    """A file of weights that is here, and where it came from, for the manifest."""

    path: Path
    told: str


@dataclass(frozen=True)
class Input:
    """How a network's weights were trained to see a picture."""

    image: ImageRecord
    normalisation: Normalisation


class Published(Protocol):
    """A network of a publisher's, with the weights and the metadata that go with it."""

    @property
    def name(self) -> str:
        """Of the member."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Of its classes, in the order of its outputs."""

    @property
    def input(self) -> Input:
        """What the weights' metadata say.

        Raises:
            ModelSetError: tandem does not do that to a picture.

        """

    def fetch(self, source: WeightsSource, report: ReportProgress) -> WeightsFile:
        """Get the weights, checked.

        Raises:
            DownloadError: they cannot be had, or are not the published ones.

        """

    def build(self, path: Path) -> torch.nn.Module:
        """Return the network with these weights: float32 (N, 3, H, W) RGB to logits (N, C).

        Raises:
            ModelSetError: the file holds no weights of this network.

        """


def on_pixels(mean: tuple[float, ...], std: tuple[float, ...]) -> Normalisation:
    """Turn three means and deviations of values 0..1, as publishers state them, into 0..255's."""
    return Normalisation(_triple(mean), _triple(std))


def _triple(values: tuple[float, ...]) -> Triple:
    red, green, blue = (round(255 * float(value), 4) for value in values)
    return red, green, blue
