"""The networks and images that rungs share: made once, in the work folder."""

import contextlib
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov

from calibration.datasets import read_dataset
from calibration.evaluation.evaluate import check_not_calibrated
from calibration.ladder.rungs import PHOTOS, TRUTH, LadderJob, RungNetwork, SkippedError
from calibration.sets.input import MEAN_RGB, SCALE_RGB
from models.errors import ImageError, ModelSetError
from models.image import Size, sides_of
from models.machine import needs_extra
from models.manifest import Manifest, MemberRecord, Network, QuantizationOptions
from models.openvino_network import CompiledNetwork, Pixels, RuntimeOptions, read_network
from models.own_functions import inputs_of
from models.record import Precision

SEED = 20
# In the work folder: the network as ONNX, and the INT8 network of a member without one in its set.
ONNX_NAME, INT8_NAME = "network.onnx", "int8.xml"
# The labelled images: the member's input, uint8 (N, H, W, 3); all members', as in models.image.
PIXELS_NAME, INPUTS_NAME = "labelled-pixels.npy", "labelled-inputs.npy"
INPUT, OUTPUT = "images", "logits"  # of the ONNX network
ALIKE = 0.02  # of a probability; FP16 weights and other kernels differ by less
CALIBRATION_IMAGES = 48  # random images: they set ranges, whose quality does not matter for speed


def random_pixels(num_images: int, size: Size, seed: int = SEED) -> Pixels:
    """Return uint8 (N, H, W, 3) BGR, the same for the same seed."""
    rng, (height, width) = np.random.default_rng(seed), sides_of(size)
    # Coarse noise, enlarged: like pictures it has areas, while all white noise looks alike.
    coarse = rng.integers(0, 256, (num_images, -(-height // 16), -(-width // 16), 3), np.uint8)
    enlarged = coarse.repeat(16, axis=1).repeat(16, axis=2)[:, :height, :width]
    pixels: Pixels = np.maximum(enlarged, rng.integers(0, 32, enlarged.shape, np.uint8))
    return pixels


def normalised(pixels: Pixels) -> npt.NDArray[np.float32]:
    """Turn uint8 (N, H, W, 3) BGR into the networks' float32 (N, 3, H, W) RGB, contiguous."""
    rgb = pixels[..., ::-1].astype(np.float32)
    scaled = (rgb - np.array(MEAN_RGB, np.float32)) / np.array(SCALE_RGB, np.float32)
    return np.ascontiguousarray(scaled.transpose(0, 3, 1, 2))


def member_ir(job: LadderJob, precision: Precision) -> Path:
    """Return the verified IR: the set's own, or the ladder's if the set has no INT8.

    Raises :class:`SkippedError` if the set's network is for another runtime.
    """
    model_set, name = job.set_of_network, job.network.name
    if precision == "INT8" and "INT8" not in model_set.manifest.member(name).networks:
        return job.work / INT8_NAME
    path = model_set.network_path(name, precision)
    if path.suffix != ".xml":
        raise SkippedError(f"{path.name} is not for OpenVINO")
    return path


def torch_module(job: LadderJob) -> Any:
    """Return the network in evaluation mode: float32 (N, 3, H, W) RGB, normalised, to logits.

    Raises:
        SkippedError: the member has no PyTorch source.
        ModelSetError: torchvision has no classification network of that name.
    """
    network = job.network
    if network.is_random:
        return random_module(network)
    no_source = (
        f"member {network.name} is an OpenVINO network without its PyTorch source; "
        "tandem ladder NAME --random-weights measures a torchvision network of any size"
    )
    if network.torch_source == "none":
        raise SkippedError(no_source)
    torch = import_torch()
    from calibration.sets.convert import build_network, unfold

    ir, pixels = member_ir(job, "FP16"), random_pixels(4, network.size)
    module = build_network(network.name, network.num_classes)
    batch = torch.from_numpy(normalised(pixels))
    try:
        unfold(module, read_network(ir), batch)
    except (ModelSetError, KeyError, RuntimeError) as error:
        raise SkippedError(f"{no_source} (its IR does not fit: {error})") from error
    options = RuntimeOptions(num_threads=job.cores, batch_sizes=(len(pixels),))
    expected = CompiledNetwork(ir, options).predict(pixels)
    with torch.inference_mode():
        answers = module.eval()(batch).softmax(1).numpy()
    if (by := float(np.abs(answers - expected).max())) > ALIKE:
        raise SkippedError(f"{no_source} (restored from its IR it answers otherwise, by {by:.2f})")
    return module


def export(job: LadderJob) -> None:
    """Export the PyTorch network with a dynamic batch; an incomplete file is removed."""
    torch = import_torch()
    with needs_extra("ladder", "ladder"):
        import onnxscript  # noqa: F401  (torch exports with it)
    incomplete = job.work / "partial.onnx"
    torch.onnx.export(
        torch_module(job),
        (torch.from_numpy(normalised(random_pixels(2, job.network.size))),),
        incomplete,
        input_names=[INPUT],
        output_names=[OUTPUT],
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        dynamo=True,
        external_data=False,
        verbose=False,
    )
    incomplete.replace(job.work / ONNX_NAME)


def random_module(network: RungNetwork) -> Any:
    """Build a torchvision network with random weights, the same each time."""
    torch = import_torch()
    from calibration.sets.convert import build_classifier

    torch.manual_seed(SEED)
    return build_classifier(network.name, network.num_classes, network.size)


def import_torch(what: str = "ladder") -> Any:
    """Return the package, which only the extras bring; ``what`` is the command that needs it."""
    with needs_extra("ladder", what):
        import torch
    return torch


def make_set(job: LadderJob) -> None:
    """Make a model set with a torchvision network of random weights, float and INT8."""
    import_torch("ladder --random-weights")
    from calibration.sets.add_set import finish
    from calibration.sets.convert import convert_module
    from calibration.sets.options import MemberOptions
    from calibration.sets.transaction import create

    network = job.network
    model = convert_module(random_module(network), network.name, network.size)
    with create(network.model_set, is_replaced=True) as staging:
        whole = staging.network(model, f"{network.name}-fp16", is_float=True)
        int8 = quantized_by_random_images(model, network)
        int8 = staging.network(int8, f"{network.name}-int8", is_float=False)
        networks: dict[Precision, Network] = {"FP16": whole, "INT8": int8}
        labels = "".join(f"class {index}\n" for index in range(network.num_classes))
        manifest = Manifest(
            name=network.model_set.name,
            description=f"{network.name} with random weights: speed only",
            image=MemberOptions().image(network.size),
            num_classes=network.num_classes,
            labels=staging.text("labels.txt", labels),
            members=(MemberRecord(name=network.name, source="random weights", networks=networks),),
        )
        finish(staging, manifest)


def quantize(job: LadderJob) -> None:
    """Quantise a member whose set has no INT8 network, with random images: for speed only."""
    if "INT8" in job.set_of_network.manifest.member(job.network.name).networks:
        return
    model = read_network(member_ir(job, "FP16"))
    path, partial = job.work / INT8_NAME, job.work / f"partial-{INT8_NAME}"
    ov.save_model(quantized_by_random_images(model, job.network), partial, compress_to_fp16=False)
    for suffix in (".bin", ".xml"):
        partial.with_suffix(suffix).replace(path.with_suffix(suffix))


def quantized_by_random_images(model: ov.Model, network: RungNetwork) -> ov.Model:
    """Quantise as ``tandem quantize`` does."""
    with needs_extra("calibrate", "ladder"):
        from calibration.quantization.quantize import quantize as quantized
    images = list(random_pixels(CALIBRATION_IMAGES, network.size))
    return quantized(model, images, QuantizationOptions())


def keep_labelled(job: LadderJob) -> None:
    """Decode the labelled images once, as the service does, for every rung's top-1.

    Raises:
        ModelSetError: no image can be read, they are of other classes, or calibration used them.
    """
    assert job.images is not None
    model_set = job.set_of_network
    chosen = read_dataset(job.images, model_set).images
    if 0 < job.max_images < len(chosen):
        chosen = tuple(random.Random(SEED).sample(chosen, job.max_images))
    check_not_calibrated(model_set, chosen)
    inputs, photos = inputs_of(model_set.manifest), job.work / PHOTOS
    images, classes = list[Pixels](), list[int]()
    shutil.rmtree(photos, ignore_errors=True)
    photos.mkdir()
    for image in chosen:
        with contextlib.suppress(ImageError, OSError):
            path = image.path.resolve()
            pixels = inputs.first_view(path.read_bytes())
            (photos / f"{len(images):08}{path.suffix}").symlink_to(path)
            images.append(pixels)
            classes.append(image.class_index)
    if not images:
        raise ModelSetError(f"none of {len(chosen)} images of {job.images} can be read")
    whole = np.stack(images)
    np.save(job.work / INPUTS_NAME, whole)
    np.save(job.work / PIXELS_NAME, inputs.of(job.network.name, whole))
    np.save(job.work / TRUTH, np.array(classes, np.int64))  # last: all files are complete


PREPARATIONS: dict[str, Callable[[LadderJob], None]] = {
    "make_set": make_set,
    "labelled": keep_labelled,
    "quantize": quantize,
    "export": export,
}
