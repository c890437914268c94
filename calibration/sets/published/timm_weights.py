"""timm's networks and their published weights, from the Hugging Face hub.

timm is an extra. Its ``pretrained_cfg`` gives classes, size, resizing, normalisation and the
address of the weights. Only safetensors are read, and timm's own loaders, some of which unpickle,
are not used.
"""

import re
from dataclasses import dataclass
from difflib import get_close_matches
from math import floor
from pathlib import Path
from typing import Any, cast, get_args

import torch
from safetensors.torch import load_file

from calibration.sets.download import DownloadError, ReportProgress, download, what_next
from calibration.sets.networks import timm_module
from calibration.sets.published.hub import hub_file
from calibration.sets.published.interface import Input, WeightsFile, WeightsSource, on_pixels
from calibration.sets.published.torchvision_weights import imagenet_labels
from models.errors import ModelSetError
from models.extras import needs_extra
from models.image_record import ImageRecord
from models.image_resize import Interpolation
from models.record import sha256_of

PREFIX = "timm:"
FILE = "model.safetensors"
MEMBER_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")  # as manifests have it
NUM_CHANNELS = 3


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
    tags = [name.partition(".")[2] for name in published]
    if not tags:
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
    resizes each side to that (``squash``), with Pillow's filters, as torchvision does.

    Raises:
        ModelSetError: another number of channels, different sides, or an unsupported rule.

    """
    channels, height, width = data["input_size"]
    if channels != NUM_CHANNELS or height != width:
        raise ModelSetError(
            f"{model} takes {channels} channels of {height} x {width}; tandem gives "
            f"{NUM_CHANNELS} of a square"
        )
    if (interpolation := data["interpolation"]) not in get_args(Interpolation):
        there = " and ".join(get_args(Interpolation))
        raise ModelSetError(f"{model} wants {interpolation} resizing; tandem has {there}")
    mode, resized = data["crop_mode"], floor(height / data["crop_pct"])
    if mode not in ("center", "squash") or (mode == "squash" and resized != height):
        raise ModelSetError(
            f"{model} wants crop_mode {mode} with crop_pct {data['crop_pct']}; tandem crops the "
            "middle (center) or stretches the whole picture (squash with crop_pct 1)"
        )
    if resized < height:
        raise ModelSetError(
            f"{model} wants crop_pct {data['crop_pct']}: a picture resized to {resized} px with a "
            f"border to {height}; tandem crops, up to crop_pct 1"
        )
    return ImageRecord(
        input_size=height,
        resize_shorter=resized,
        resize="stretch" if mode == "squash" else "crop",
        interpolation=cast(Interpolation, interpolation),
    )
