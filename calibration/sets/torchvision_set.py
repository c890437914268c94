"""Creates imagenet1k: torchvision's published weights as a float model set."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from calibration.sets.add_set import finish
from calibration.sets.convert import convert_module
from calibration.sets.download import DownloadError, ReportProgress, check_hash, download
from calibration.sets.fold import Normalisation
from calibration.sets.networks import build_network, torchvision_models
from calibration.sets.staging import Staging
from calibration.sets.transaction import create
from models.errors import ModelSetError
from models.image_record import ImageRecord
from models.manifest import Manifest, MemberRecord, read_manifest
from models.model_set import ModelSet

NAME = "imagenet1k"
DESCRIPTION = "ImageNet's 1000 classes: torchvision's published weights of both networks."
# torchvision names a file <network>-<first hex digits of its sha256>.pth and checks them so.
HASH_IN_NAME = re.compile(r"-([0-9a-f]{8,})\.pth$")
# DenseNet's weights were published before its layers were renamed: norm.1 is norm1 now.
OLD_DENSENET_KEY = re.compile(r"(denselayer\d+\.(?:norm|relu|conv))\.([12])\.")


@dataclass(frozen=True)
class Source:
    """Where the weight files come from."""

    cache_dir: Path  # downloads go here and stay
    weights_dir: Path | None = None  # files fetched elsewhere; nothing is downloaded
    mirror: str | None = None  # base URL in place of the publisher's


def published_weights(resnet50: str = "IMAGENET1K_V1") -> dict[str, Any]:
    """Return torchvision's weights entries, by member: url, transforms and meta."""
    models = torchvision_models()
    try:
        chosen = models.ResNet50_Weights[resnet50]
    except KeyError:
        there = ", ".join(entry.name for entry in models.ResNet50_Weights)
        raise ModelSetError(f"no ResNet50 weights {resnet50!r}; there are: {there}") from None
    return {"resnet50": chosen, "densenet169": models.DenseNet169_Weights.IMAGENET1K_V1}


def fetch_set(
    weights: Mapping[str, Any],
    into: Path,
    source: Source,
    report: ReportProgress = lambda _, __: None,
    *,
    name: str = NAME,
    is_replaced: bool = False,
) -> ModelSet:
    """Get the files, convert, write the set; it appears whole or not at all.

    ``weights``: torchvision's entries by network name. Labels, sizes and normalisation are taken
    from them.

    Raises:
        DownloadError: a file could not be had, or is not the published one.
        ModelSetError: the entries do not make one set, or the disk is full.

    """
    labels = _labels(weights)
    image, normalisation, note = _preprocessing(weights)
    folder = into / name
    if folder.exists() and not is_replaced:
        raise ModelSetError(f"{folder} exists; --replace makes it anew")
    files = {network: _file(entry.url, source, report) for network, entry in weights.items()}
    with create(folder, is_replaced=is_replaced) as staging:
        members = tuple(
            _member(staging, network, path, weights[network], len(labels), image, normalisation)
            for network, path in files.items()
        )
        manifest = Manifest(
            name=name,
            description=" ".join(filter(None, [DESCRIPTION, note])),
            image=image,
            num_classes=len(labels),
            labels=staging.text("labels.txt", "".join(f"{label}\n" for label in labels)),
            members=members,
        )
        finish(staging, manifest)
    return ModelSet(folder, read_manifest(folder))


def _labels(weights: Mapping[str, Any]) -> list[str]:
    found = {tuple(entry.meta["categories"]) for entry in weights.values()}
    if len(found) != 1:
        raise ModelSetError("these weights were trained on different classes: not one ensemble")
    return list(found.pop())


def _preprocessing(weights: Mapping[str, Any]) -> tuple[ImageRecord, Normalisation, str]:
    """Return the set's one rule; where the weights' own differ, the first one's and a note."""
    presets = {name: entry.transforms() for name, entry in weights.items()}
    rules = {name: (preset.crop_size[0], preset.resize_size[0]) for name, preset in presets.items()}
    first = next(iter(presets.values()))
    for preset in presets.values():
        if str(preset.interpolation.value) != "bilinear":
            raise ModelSetError(
                f"these weights want {preset.interpolation.value} resizing; tandem has bilinear"
            )
        if (list(preset.mean), list(preset.std)) != (list(first.mean), list(first.std)):
            raise ModelSetError("these weights are normalised differently: not one ensemble")
    crop, resize = next(iter(rules.values()))
    if any(rule[0] != crop for rule in rules.values()):
        raise ModelSetError(f"these weights take different sizes: {rules}")
    note = ""
    if len(set(rules.values())) > 1:
        told = ", ".join(f"{name} {rule[1]}" for name, rule in rules.items())
        note = f"Resized to {resize} px for both; trained with {told}."
    mean, std = ([255 * float(v) for v in values] for values in (first.mean, first.std))
    normalisation = Normalisation(_triple(mean), _triple(std))
    return ImageRecord(input_size=crop, resize_shorter=resize), normalisation, note


def _triple(values: Sequence[float]) -> tuple[float, float, float]:
    red, green, blue = (round(value, 4) for value in values)
    return red, green, blue


def _file(url: str, source: Source, report: ReportProgress) -> Path:
    """Return the weights' file, its hash checked: from a folder, the cache, or the network."""
    name = PurePosixPath(url).name
    match = HASH_IN_NAME.search(name)
    if match is None:
        raise ModelSetError(f"{name} does not carry its hash: it cannot be checked")
    if source.weights_dir is not None:
        path = source.weights_dir / name
        if not path.is_file():
            raise DownloadError(f"{path} is not there; fetch it from {url} and put it there")
        check_hash(path, match[1])
        return path
    if source.mirror is not None:
        url = f"{source.mirror.rstrip('/')}/{name}"
    return download(url, source.cache_dir / name, match[1], report)


def _member(
    staging: Staging,
    network: str,
    path: Path,
    entry: Any,
    num_classes: int,
    image: ImageRecord,
    normalisation: Normalisation,
) -> MemberRecord:
    module = build_network(network, num_classes)
    _load(module, path)
    model = convert_module(module, network, image.input_size, normalisation)
    digits = HASH_IN_NAME.search(path.name)
    return MemberRecord(
        name=network,
        source=f"torchvision {entry!s}, {entry.url}, sha256 {digits[1] if digits else ''}...",
        networks={"FP16": staging.network(model, f"{network}-fp16", is_float=True)},
    )


def _load(module: torch.nn.Module, path: Path) -> None:
    """Load a state dict; weights only, so that no code in the file is run."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        renamed = {OLD_DENSENET_KEY.sub(r"\1\2.", key): value for key, value in state.items()}
        module.load_state_dict(renamed)
    except Exception as error:  # torch raises many kinds; all mean the same here
        first_line = str(error).splitlines()[0]
        raise ModelSetError(f"{path} are no weights of this network: {first_line}") from error
