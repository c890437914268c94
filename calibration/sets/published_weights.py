"""Creates imagenet1k, a float model set of networks with published weights: torchvision's, timm's.

``tandem models fetch`` names its members. ``NAME`` or ``NAME=WEIGHTS`` is torchvision's.
``timm:MODEL`` or ``NAME=timm:MODEL`` is timm's; MODEL may include the weights
(``mobilenetv3_small_100.lamb_in1k``). torchvision's weights never have a colon in their name.

torchvision's weights are from download.pytorch.org, timm's from the Hugging Face hub. timm is an
extra. Its ``pretrained_cfg`` gives classes, size, resizing, normalisation and the address of the
weights. Only safetensors are read, and timm's own loaders, some of which unpickle, are not used.
"""

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from math import floor
from pathlib import Path, PurePosixPath
from typing import Any, cast, get_args

import numpy as np
import openvino as ov
import torch
from safetensors.torch import load_file

from calibration.sets.add_set import finish
from calibration.sets.convert import (
    build_network,
    convert_module,
    known_networks,
    timm_module,
    torchvision_models,
)
from calibration.sets.files import (
    DownloadError,
    ReportProgress,
    check_hash,
    download,
    hub_file,
    what_next,
)
from calibration.sets.input import Normalisation, Triple, trial_images
from calibration.sets.transaction import Staging, check_free, create
from models.errors import ModelSetError
from models.image import sides_of
from models.image_geometry import Interpolation
from models.machine import needs_extra
from models.manifest import MAX_MEMBERS, Manifest, MemberRecord, read_manifest
from models.model_set import ModelSet
from models.openvino_network import CompiledNetwork, RuntimeOptions, last_line
from models.record import ImageRecord, sha256_of
from models.stores import HUB

NAME = "imagenet1k"
DESCRIPTION = "ImageNet's 1000 classes: published weights of torchvision and timm."
NUM_TRIED = 2  # images that a conversion is compared with: more than one shows a built-in batch
TOLERANCE = 0.02  # of the largest probability, both in float32
# torchvision names a file <network>-<first hex digits of its sha256>.pth and checks them so.
HASH_IN_NAME = re.compile(r"-([0-9a-f]{8,})\.pth$")
# DenseNet's weights were published before its layers were renamed: norm.1 is norm1 now.
OLD_DENSENET_KEY = re.compile(r"(denselayer\d+\.(?:norm|relu|conv))\.([12])\.")
PREFIX = "timm:"
FILE = "model.safetensors"
MEMBER_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")  # as manifests have it
NUM_CHANNELS = 3


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


def _interpolation(whose: str, wanted: str) -> Interpolation:
    if wanted not in get_args(Interpolation):
        there = " and ".join(get_args(Interpolation))
        raise ModelSetError(f"{whose} wants {wanted} resizing; tandem has {there}")
    return cast(Interpolation, wanted)


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
        image = ImageRecord(
            input_size=preset.crop_size[0],
            resize_shorter=preset.resize_size[0],
            interpolation=_interpolation(str(self.entry), str(preset.interpolation.value)),
        )
        return Input(image, on_pixels(preset.mean, preset.std))

    def fetch(self, source: WeightsSource, report: ReportProgress) -> WeightsFile:
        """Return the file, its hash checked: from a folder, the cache, or the network."""
        url = str(self.entry.url)
        name = PurePosixPath(url).name
        if (match := HASH_IN_NAME.search(name)) is None:
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

    Raises :class:`ModelSetError` if torchvision has no such network or weights.
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


@dataclass(frozen=True)
class TimmWeights:
    """A network of timm with weights; ``name`` is the member's."""

    name: str
    model: str  # timm's name of both, as mobilenetv3_small_100.lamb_in1k
    repository: str  # on the hub
    config: dict[str, Any]  # timm's pretrained_cfg

    @property
    def labels(self) -> tuple[str, ...]:
        """ImageNet-1k's labels, since networks with other classes are refused before."""
        return imagenet_labels()

    @property
    def input(self) -> Input:
        """The preprocessing of timm for these weights, at the size they were trained at."""
        data = timm_module().data.resolve_data_config(pretrained_cfg=self.config)
        image = _image(self.model, data)
        return Input(image, on_pixels(data["mean"], data["std"]))

    def fetch(self, source: WeightsSource, report: ReportProgress) -> WeightsFile:
        """Return the safetensors file, from a folder, the cache, or the hub with its hash."""
        name = f"{self.model}.safetensors"
        if source.weights_dir is not None:
            path = source.weights_dir / name
            if not path.is_file():
                url = f"{source.hub.rstrip('/')}/{self.repository}/resolve/main/{FILE}"
                raise DownloadError(f"{path} is not there; fetch {url} and put it there so named")
            return WeightsFile(path, self._identity(path.name, sha256_of(path)))
        file = hub_file(source.hub, self.repository, FILE, what_next(name))
        path = source.cache_dir / file.sha256[:16] / name
        got = download(file.url, path, file.sha256, report)
        return WeightsFile(got, self._identity(file.url, file.sha256))

    def _identity(self, where: str, sha256: str) -> str:
        terms = self.config["license"]
        license_ = f", license {terms}" if terms else ""
        return f"timm {self.model}, {where}, sha256 {sha256}{license_}"

    def build(self, path: Path) -> torch.nn.Module:
        """Load the tensors into timm's network, with timm's own conversion of weights."""
        overlay = {"url": None, "file": None, "hf_hub_id": None, "custom_load": False}
        try:
            overlay["state_dict"] = load_file(path)
            network: torch.nn.Module = timm_module().create_model(
                self.model, pretrained=True, pretrained_cfg_overlay=overlay
            )
        except Exception as error:  # safetensors, torch and timm raise kinds of their own
            first_line = (str(error).splitlines() or [type(error).__name__])[0]
            raise ModelSetError(f"{path} are no weights of {self.model}: {first_line}") from error
        return network


def timm_weights(model: str, name: str | None = None) -> TimmWeights:
    """Return a network of timm.

    Args:
        model: ``ARCHITECTURE`` (timm's default weights) or ``ARCHITECTURE.WEIGHTS``.
        name: of the member; the architecture's by default.

    Raises:
        MissingExtraError: timm is not installed.
        ModelSetError: timm has no such network or weights, or they do not classify ImageNet-1k.
    """
    with needs_extra("timm", f"models fetch of {PREFIX}{model}"):
        timm = timm_module()
    architecture, _, tag = model.partition(".")
    if not timm.is_model(architecture):
        known = timm.list_models()
        near = get_close_matches(architecture, known) or known[:5]
        raise ModelSetError(
            f"timm {timm.__version__} has no network {architecture!r}, of {len(known)}; "
            f"as {', '.join(near)}"
        )
    name = architecture if name is None else name
    if MEMBER_NAME.fullmatch(name) is None:
        raise ModelSetError(
            f"--member {name}={PREFIX}{model}: a member's name has small letters, digits and _, at "
            "most 63, a letter first"
        )
    config = _config(timm, architecture, tag)
    model = f"{architecture}.{config['tag']}" if config["tag"] else architecture
    _check_classes(model, config)
    weights = TimmWeights(name, model, str(config["hf_hub_id"]), config)
    _ = weights.input  # refused here, before anything is fetched
    return weights


def _config(timm: Any, architecture: str, tag: str) -> dict[str, Any]:
    published = timm.list_pretrained(f"{architecture}.*") or timm.list_pretrained(architecture)
    if not (tags := [name.partition(".")[2] for name in published]):
        raise ModelSetError(f"timm has no published weights of {architecture}: choose another")
    if tag and tag not in tags:
        raise ModelSetError(f"no {architecture} weights {tag!r}; there are: {', '.join(tags)}")
    known = timm.models.get_pretrained_cfg(f"{architecture}.{tag}" if tag else architecture)
    config: dict[str, Any] = known.to_dict(remove_null=False)
    if not config["hf_hub_id"]:
        raise ModelSetError(
            f"{architecture}'s weights are not on the Hugging Face hub, where they would be "
            "safetensors: what timm has of them is a pickle, which is never opened"
        )
    if config["hf_hub_filename"]:
        raise ModelSetError(
            f"{architecture}.{config['tag']} is {config['hf_hub_filename']} of a larger model on "
            "the hub, not weights of its own: choose another"
        )
    return config


def _check_classes(model: str, config: dict[str, Any]) -> None:
    number, needed = int(config["num_classes"]), len(imagenet_labels())
    if number == 0:
        raise ModelSetError(
            f"{model} was published without a classifier (0 classes), for its features; imagenet1k "
            f"needs one of {needed}: choose weights that end in in1k"
        )
    if number != needed:
        raise ModelSetError(
            f"{model} has {number} classes; imagenet1k has {needed}: choose weights that were "
            "trained or fine-tuned on those, as those that end in in1k"
        )


def _image(model: str, data: dict[str, Any]) -> ImageRecord:
    """Convert timm's data configuration to an image rule of the manifest.

    timm resizes the shorter side to floor(size / crop_pct) and crops the middle (``center``), or
    resizes each side to that (``squash``), with Pillow's filters, as torchvision does. Raises
    :class:`ModelSetError` if channels or sides do not fit, or a rule is not supported.
    """
    channels, height, width = data["input_size"]
    if channels != NUM_CHANNELS or height != width:
        raise ModelSetError(
            f"{model} takes {channels} channels of {height} x {width}; tandem gives "
            f"{NUM_CHANNELS} of a square"
        )
    interpolation = _interpolation(model, data["interpolation"])
    mode, resized = data["crop_mode"], floor(height / data["crop_pct"])
    if mode not in ("center", "squash"):
        raise ModelSetError(
            f"{model} wants crop_mode {mode}; tandem crops the middle (center), or that of the "
            "whole picture stretched (squash)"
        )
    if resized < height:
        raise ModelSetError(
            f"{model} wants crop_pct {data['crop_pct']}: a picture resized to {resized} px with a "
            f"border to {height}; tandem crops, up to crop_pct 1"
        )
    return ImageRecord(
        input_size=height,
        resize_shorter=resized,
        resize="crop" if mode == "center" else "stretch" if resized == height else "squash",
        interpolation=interpolation,
    )


Published = TorchvisionWeights | TimmWeights


def fetch_set(
    networks: Sequence[Published],
    into: Path,
    source: WeightsSource,
    report: ReportProgress = lambda _, __: None,
    *,
    name: str = NAME,
    is_replaced: bool = False,
) -> ModelSet:
    """Get the files, convert, write the set; it appears whole or not at all.

    Labels, and each network's size, resize rule and normalisation, are its publisher's.

    Raises:
        DownloadError: a file could not be had, or is not the published one.
        ModelSetError: the networks do not make one set, one does not answer as its original, or
            the disk is full.
    """
    labels, *others = {network.labels for network in networks}
    if others:
        raise ModelSetError("these weights were trained on different classes: not one ensemble")
    image = networks[0].input.image
    folder = into / name
    check_free(folder, is_replaced=is_replaced, other="folder (--into)")
    files = [network.fetch(source, report) for network in networks]
    with create(folder, is_replaced=is_replaced, made_by="tandem models fetch") as staging:
        members = tuple(
            _member(staging, network, file, image)
            for network, file in zip(networks, files, strict=True)
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


def _member(
    staging: Staging, network: Published, file: WeightsFile, image: ImageRecord
) -> MemberRecord:
    own, module = network.input, network.build(file.path)
    model = _converted(network.name, module, own)
    _check_answers(network.name, module, model, own.normalisation)
    return MemberRecord(
        name=network.name,
        source=file.origin,
        networks={"FP16": staging.network(model, f"{network.name}-fp16", is_float=True)},
        image=None if own.image == image else own.image,
    )


def _converted(name: str, module: torch.nn.Module, own: Input) -> ov.Model:
    """Convert a network; whether what was traced holds for other images is seen afterwards."""
    size = own.image.input_size
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", torch.jit.TracerWarning)
            with torch.no_grad():  # some keep what their first image makes: not part of the trace
                module.eval()(torch.zeros(1, NUM_CHANNELS, *sides_of(size)))
            return convert_module(module, name, size, own.normalisation)
    except Exception as error:  # torch and OpenVINO raise many kinds
        raise ModelSetError(
            f"{name} cannot be converted to OpenVINO: {last_line(error)}. Choose another network"
        ) from error


def _check_answers(
    name: str, module: torch.nn.Module, model: ov.Model, normalisation: Normalisation
) -> None:
    """Compare the converted network with its original on images of noise.

    Raises :class:`ModelSetError` if it does not run, or does not answer the same.
    """
    try:
        compiled = CompiledNetwork(model, RuntimeOptions(batch_sizes=(NUM_TRIED,)))
        pixels = trial_images(NUM_TRIED, compiled.input_shape)  # (2, H, W, 3) uint8 BGR
        answers = compiled.predict(pixels)
    except RuntimeError as error:
        raise ModelSetError(f"{name} does not run after conversion: {last_line(error)}") from error
    rgb = torch.from_numpy(np.ascontiguousarray(pixels[..., ::-1])).float()
    batch = (rgb - torch.tensor(normalisation.mean)) / torch.tensor(normalisation.scale)
    with torch.inference_mode():
        expected = module(batch.permute(0, 3, 1, 2)).softmax(1).numpy()  # (2, C)
    if not np.isfinite(expected).all():
        raise ModelSetError(f"{name} answers no numbers in PyTorch: its weights are damaged")
    far = float((np.abs(answers - expected) / expected.max(axis=1, keepdims=True)).max())
    if not far <= TOLERANCE:  # nor if it is not a number
        raise ModelSetError(
            f"{name} does not answer as in PyTorch after conversion: probabilities differ by up to "
            f"{far:.2g} of the largest, {TOLERANCE} is the limit. Choose another network"
        )


def read_members(texts: Sequence[str]) -> list[Published]:
    """Return the networks in the order of ``texts``.

    Raises:
        MissingExtraError: timm is not installed, but a network is timm's.
        ModelSetError: unknown network or weights, too many networks, or a repeated name.
    """
    members: dict[str, Published] = {}
    for text in texts:
        name, _, version = text.partition("=")
        network: Published
        if text.startswith(PREFIX):
            network = timm_weights(text.removeprefix(PREFIX))
        elif version.startswith(PREFIX):
            network = timm_weights(version.removeprefix(PREFIX), name)
        else:
            network = torchvision_weights(name, version)
        if network.name in members:
            raise ModelSetError(
                f"--member {network.name} is given twice; a set has a name once. One of timm's "
                "takes another name so: NAME=timm:MODEL"
            )
        members[network.name] = network
    if len(members) > MAX_MEMBERS:
        raise ModelSetError(f"{len(members)} members; a set has 1 to {MAX_MEMBERS}: leave some out")
    return list(members.values())
