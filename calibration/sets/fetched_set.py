"""Creates imagenet1k: networks with published weights as a float model set.

``tandem models fetch`` names its members. ``NAME`` or ``NAME=WEIGHTS`` is torchvision's.
``timm:MODEL`` or ``NAME=timm:MODEL`` is timm's; MODEL may include the weights
(``mobilenetv3_small_100.lamb_in1k``). torchvision's weights never have a colon in their name.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import openvino as ov
import torch

from calibration.sets.add_set import finish
from calibration.sets.convert import convert_module
from calibration.sets.download import ReportProgress
from calibration.sets.input import Normalisation, trial_images
from calibration.sets.published_weights import (
    PREFIX,
    Input,
    TimmWeights,
    TorchvisionWeights,
    WeightsFile,
    WeightsSource,
    timm_weights,
    torchvision_weights,
)
from calibration.sets.transaction import Staging, check_free, create
from models.errors import ModelSetError
from models.manifest import MAX_MEMBERS, Manifest, MemberRecord, read_manifest
from models.model_set import ModelSet
from models.openvino_network import CompiledNetwork, RuntimeOptions, last_line
from models.record import ImageRecord

NAME = "imagenet1k"
DESCRIPTION = "ImageNet's 1000 classes: published weights of torchvision and timm."
NUM_CHANNELS = 3
NUM_TRIED = 2  # images that a conversion is compared with: more than one shows a built-in batch
TOLERANCE = 0.02  # of the largest probability, both in float32
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
    labels = _labels(networks)
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


def _labels(networks: Sequence[Published]) -> tuple[str, ...]:
    labels = {network.labels for network in networks}
    if len(labels) != 1:
        raise ModelSetError("these weights were trained on different classes: not one ensemble")
    return labels.pop()


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
                module.eval()(torch.zeros(1, NUM_CHANNELS, size, size))
            return convert_module(module, name, size, own.normalisation)
    except Exception as error:  # torch and OpenVINO raise many kinds
        raise ModelSetError(
            f"{name} cannot be converted to OpenVINO: {last_line(error)}. Choose another network"
        ) from error


def _check_answers(
    name: str, module: torch.nn.Module, model: ov.Model, normalisation: Normalisation
) -> None:
    """Compare the converted network with its original on images of noise.

    Raises:
        ModelSetError: it does not run, or does not answer the same.

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
        network = _network(text)
        if network.name in members:
            raise ModelSetError(
                f"--member {network.name} is given twice; a set has a name once. One of timm's "
                "takes another name so: NAME=timm:MODEL"
            )
        members[network.name] = network
    if len(members) > MAX_MEMBERS:
        raise ModelSetError(f"{len(members)} members; a set has 1 to {MAX_MEMBERS}: leave some out")
    return list(members.values())


def _network(text: str) -> Published:
    if text.startswith(PREFIX):
        return timm_weights(text.removeprefix(PREFIX))
    name, _, version = text.partition("=")
    if version.startswith(PREFIX):
        return timm_weights(version.removeprefix(PREFIX), name)
    return torchvision_weights(name, version)
