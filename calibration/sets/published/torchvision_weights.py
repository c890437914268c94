"""Torchvision's networks and their published weights, from download.pytorch.org."""

import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path, PurePosixPath
from typing import Any, cast, get_args

import torch

from calibration.sets.download import DownloadError, ReportProgress, check_hash, download
from calibration.sets.networks import build_network, known_networks, torchvision_models
from calibration.sets.published.interface import Input, WeightsFile, WeightsSource, on_pixels
from models.errors import ModelSetError
from models.image_record import ImageRecord
from models.image_resize import Interpolation

# torchvision names a file <network>-<first hex digits of its sha256>.pth and checks them so.
HASH_IN_NAME = re.compile(r"-([0-9a-f]{8,})\.pth$")
# DenseNet's weights were published before its layers were renamed: norm.1 is norm1 now.
OLD_DENSENET_KEY = re.compile(r"(denselayer\d+\.(?:norm|relu|conv))\.([12])\.")


@dataclass(frozen=True)
class TorchvisionWeights:
    """A weights entry of torchvision; ``name`` is the network's and the member's."""

    name: str
    entry: Any  # url, transforms and meta

    @property
    def labels(self) -> tuple[str, ...]:
        """The categories in the entry."""
        return tuple(self.entry.meta["categories"])

    @property
    def input(self) -> Input:
        """The preprocessing of the entry's preset."""
        preset = self.entry.transforms()
        interpolation = str(preset.interpolation.value)
        if interpolation not in get_args(Interpolation):
            there = " and ".join(get_args(Interpolation))
            raise ModelSetError(
                f"{self.entry!s} wants {interpolation} resizing; tandem has {there}"
            )
        image = ImageRecord(
            input_size=preset.crop_size[0],
            resize_shorter=preset.resize_size[0],
            interpolation=cast(Interpolation, interpolation),
        )
        return Input(image, on_pixels(preset.mean, preset.std))

    def fetch(self, source: WeightsSource, report: ReportProgress) -> WeightsFile:
        """Return the file, its hash checked: from a folder, the cache, or the network."""
        url = str(self.entry.url)
        name = PurePosixPath(url).name
        match = HASH_IN_NAME.search(name)
        if match is None:
            raise ModelSetError(f"{name} does not carry its hash: it cannot be checked")
        origin = f"torchvision {self.entry!s}, {url}, sha256 {match[1]}..."
        if source.weights_dir is not None:
            path = source.weights_dir / name
            if not path.is_file():
                raise DownloadError(f"{path} is not there; fetch it from {url} and put it there")
            check_hash(path, match[1])
            return WeightsFile(path, origin)
        if source.mirror is not None:
            url = f"{source.mirror.rstrip('/')}/{name}"
        return WeightsFile(download(url, source.cache_dir / name, match[1], report), origin)

    def build(self, path: Path) -> torch.nn.Module:
        """Load the state dict with ``weights_only``, so that no code in the file is run."""
        module = build_network(self.name, len(self.labels), self.input.image.input_size)
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            renamed = {OLD_DENSENET_KEY.sub(r"\1\2.", key): value for key, value in state.items()}
            module.load_state_dict(renamed)
        except Exception as error:  # torch raises many kinds; all mean the same here
            first_line = (str(error).splitlines() or [type(error).__name__])[0]
            raise ModelSetError(f"{path} are no weights of this network: {first_line}") from error
        return module


def usual_weights(resnet50: str = "IMAGENET1K_V1") -> list[TorchvisionWeights]:
    """Return the members to fetch if none is named: ResNet50 and DenseNet169."""
    models = torchvision_models()
    try:
        chosen = models.ResNet50_Weights[resnet50]
    except KeyError:
        there = ", ".join(entry.name for entry in models.ResNet50_Weights)
        raise ModelSetError(f"no ResNet50 weights {resnet50!r}; there are: {there}") from None
    densenet169 = models.DenseNet169_Weights.IMAGENET1K_V1
    return [TorchvisionWeights("resnet50", chosen), TorchvisionWeights("densenet169", densenet169)]


def torchvision_weights(name: str, version: str = "") -> TorchvisionWeights:
    """Return torchvision's entry ``version``, or its best one if that is empty.

    Raises:
        ModelSetError: torchvision has no such network or weights.

    """
    if name not in (known := known_networks()):
        near = get_close_matches(name, known) or known[:5]
        raise ModelSetError(
            f"no network {name!r}; torchvision has {len(known)}, as {', '.join(near)}; one of "
            "timm's is written timm:NAME"
        )
    entries = torchvision_models().get_model_weights(name)
    names = [entry.name for entry in entries]
    if version and version not in names:
        raise ModelSetError(f"no {name} weights {version!r}; there are: {', '.join(names)}")
    return TorchvisionWeights(name, entries[version] if version else entries.DEFAULT)


def imagenet_labels() -> tuple[str, ...]:
    """Return ImageNet-1k's 1,000 classes, with torchvision's names and order."""
    return TorchvisionWeights("", torchvision_models().ResNet50_Weights.DEFAULT).labels
