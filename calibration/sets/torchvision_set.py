"""Creates imagenet1k: torchvision's published weights as a float model set."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path, PurePosixPath
from typing import Any, cast, get_args

import torch

from calibration.sets.add_set import finish
from calibration.sets.convert import convert_module
from calibration.sets.download import DownloadError, ReportProgress, check_hash, download
from calibration.sets.fold import Normalisation
from calibration.sets.networks import build_network, known_networks, torchvision_models
from calibration.sets.staging import Staging
from calibration.sets.transaction import create
from models.errors import ModelSetError
from models.image_record import ImageRecord
from models.image_resize import Interpolation
from models.manifest import MAX_MEMBERS, Manifest, MemberRecord, read_manifest
from models.model_set import ModelSet

NAME = "imagenet1k"
DESCRIPTION = "ImageNet's 1000 classes: torchvision's published weights."
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


def weights_of(members: Sequence[str]) -> dict[str, Any]:
    """Return torchvision's weights entries of ``NAME`` (its best) or ``NAME=WEIGHTS``, by name.

    Raises:
        ModelSetError: no such network or weights, too many, or one twice.

    """
    found: dict[str, Any] = {}
    for member in members:
        name, _, version = member.partition("=")
        if name in found:
            raise ModelSetError(f"--member {name} is given twice; a set has a network once")
        if name not in (known := known_networks()):
            near = get_close_matches(name, known) or known[:5]
            told = f"no network {name!r}; torchvision has {len(known)}, as {', '.join(near)}"
            raise ModelSetError(told)
        entries = torchvision_models().get_model_weights(name)
        names = [entry.name for entry in entries]
        if version and version not in names:
            raise ModelSetError(f"no {name} weights {version!r}; there are: {', '.join(names)}")
        found[name] = entries[version] if version else entries.DEFAULT
    if len(found) > MAX_MEMBERS:
        raise ModelSetError(f"{len(found)} members; a set has 1 to {MAX_MEMBERS}: leave some out")
    return found


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

    ``weights``: torchvision's entries by network name. Labels, and each network's size, resize rule
    and normalisation, are taken from them.

    Raises:
        DownloadError: a file could not be had, or is not the published one.
        ModelSetError: the entries do not make one set, or the disk is full.

    """
    labels = _labels(weights)
    inputs = {network: _input(entry) for network, entry in weights.items()}
    image = next(iter(inputs.values()))[0]
    folder = into / name
    if folder.exists() and not is_replaced:
        raise ModelSetError(f"{folder} exists; --replace makes it anew")
    files = {network: _file(entry.url, source, report) for network, entry in weights.items()}
    with create(folder, is_replaced=is_replaced) as staging:
        members = tuple(
            _member(staging, network, path, weights[network], len(labels), inputs[network], image)
            for network, path in files.items()
        )
        manifest = Manifest(
            name=name,
            description=DESCRIPTION,
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


def _input(entry: Any) -> tuple[ImageRecord, Normalisation]:
    """Return how a network's weights were trained to see a picture."""
    preset = entry.transforms()
    interpolation = str(preset.interpolation.value)
    if interpolation not in get_args(Interpolation):
        there = " and ".join(get_args(Interpolation))
        raise ModelSetError(f"{entry!s} wants {interpolation} resizing; tandem has {there}")
    record = ImageRecord(
        input_size=preset.crop_size[0],
        resize_shorter=preset.resize_size[0],
        interpolation=cast(Interpolation, interpolation),
    )
    mean, std = ([255 * float(v) for v in values] for values in (preset.mean, preset.std))
    return record, Normalisation(_triple(mean), _triple(std))


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
    inputs: tuple[ImageRecord, Normalisation],
    image: ImageRecord,
) -> MemberRecord:
    own, normalisation = inputs
    module = build_network(network, num_classes, own.input_size)
    _load(module, path)
    model = convert_module(module, network, own.input_size, normalisation)
    digits = HASH_IN_NAME.search(path.name)
    return MemberRecord(
        name=network,
        source=f"torchvision {entry!s}, {entry.url}, sha256 {digits[1] if digits else ''}...",
        networks={"FP16": staging.network(model, f"{network}-fp16", is_float=True)},
        image=None if own == image else own,
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
