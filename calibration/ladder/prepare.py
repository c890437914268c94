"""Prepares inputs of rungs: a set with random weights, labelled pixels, INT8 networks."""

import json
import random
from collections.abc import Callable

import numpy as np
import openvino as ov

from calibration.datasets import Dataset, read_dataset
from calibration.evaluation.evaluate import check_not_calibrated
from calibration.ladder.engine import (
    INPUTS_NAME,
    PIXELS_NAME,
    SEED,
    TRUTH_NAME,
    random_pixels,
)
from calibration.ladder.onnx_engine import export
from calibration.ladder.openvino_engine import member_ir
from calibration.ladder.rung import INT8_NAME, LABELLED_FILES, RungNetwork, RungTask
from models.errors import ImageError, ModelSetError
from models.extras import needs_extra
from models.image_record import ImageRecord
from models.manifest import (
    Manifest,
    MemberRecord,
    Network,
    QuantizationOptions,
    read_manifest,
)
from models.model_set import ModelSet
from models.record import Precision
from models.runtime import read_network

CALIBRATION_IMAGES = 48  # random images: they set ranges, whose quality does not matter for speed


def make_set(task: RungTask) -> None:
    """Make a model set with a torchvision network of random weights, float and INT8."""
    with needs_extra("ladder", "ladder --random-weights"):
        import torch  # noqa: F401

        from calibration.ladder.torch_network import random_network
        from calibration.sets.convert import convert_module
    from calibration.sets.add_set import finish
    from calibration.sets.transaction import create

    network = task.network
    model = convert_module(random_network(network), network.name, network.size)
    with create(network.model_set, is_replaced=True) as staging:
        networks: dict[Precision, Network] = {
            "FP16": staging.network(model, f"{network.name}-fp16", is_float=True)
        }
        quantized = quantized_by_random_images(model, network)
        networks["INT8"] = staging.network(quantized, f"{network.name}-int8", is_float=False)
        labels = "".join(f"class {index}\n" for index in range(network.num_classes))
        manifest = Manifest(
            name=network.model_set.name,
            description=f"{network.name} with random weights: speed only",
            image=ImageRecord(input_size=network.size, resize_shorter=round(network.size * 8 / 7)),
            num_classes=network.num_classes,
            labels=staging.text("labels.txt", labels),
            members=(MemberRecord(name=network.name, source="random weights", networks=networks),),
        )
        finish(staging, manifest)


def quantize(task: RungTask) -> None:
    """Quantise a member whose set has no INT8 network, with random images: for speed only."""
    network = task.network
    manifest = read_manifest(network.model_set)
    if "INT8" in manifest.member(network.name).networks:
        return
    model = read_network(member_ir(network, "FP16", task.work))
    path = task.work / INT8_NAME
    partial = path.with_name(f"partial-{path.name}")
    ov.save_model(quantized_by_random_images(model, network), partial, compress_to_fp16=False)
    partial.with_suffix(".bin").replace(path.with_suffix(".bin"))
    partial.replace(path)


def quantized_by_random_images(model: ov.Model, network: RungNetwork) -> ov.Model:
    """Quantise as ``tandem quantize`` does."""
    with needs_extra("calibrate", "ladder"):
        from calibration.quantization.quantize import quantize as quantized
    return quantized(
        model, list(random_pixels(CALIBRATION_IMAGES, network.size)), QuantizationOptions()
    )


def keep_labelled(task: RungTask) -> None:
    """Decode the labelled images once, as the service does, for every rung's top-1.

    Raises:
        ModelSetError: no image can be read, they are of other classes, or calibration used them.

    """
    if task.images is None:
        raise ModelSetError("labelled images: none were given")
    model_set = ModelSet(task.network.model_set, read_manifest(task.network.model_set))
    dataset = read_dataset(task.images, model_set)
    chosen = _some(dataset, task.max_images)
    check_not_calibrated(model_set, chosen.images)
    inputs, images, truth, files = model_set.manifest.inputs, [], [], []
    for image in chosen.images:
        try:
            images.append(inputs.read(image.path.read_bytes()))
        except (ImageError, OSError):
            continue
        truth.append(image.class_index)
        files.append([str(image.path.resolve()), image.class_index])
    if not images:
        raise ModelSetError(f"none of {len(chosen.images)} images of {task.images} can be read")
    whole = np.stack(images)
    np.save(task.work / INPUTS_NAME, whole, allow_pickle=False)
    np.save(task.work / PIXELS_NAME, inputs.of(task.network.name, whole), allow_pickle=False)
    (task.work / LABELLED_FILES).write_text(json.dumps(files), "utf-8")
    # The last file: its presence shows that all files are complete.
    np.save(task.work / TRUTH_NAME, np.array(truth, np.int64), allow_pickle=False)


def _some(dataset: Dataset, max_images: int) -> Dataset:
    """Return a random sample with a fixed seed; all images if there are no more."""
    if not 0 < max_images < len(dataset.images):
        return dataset
    chosen = random.Random(SEED).sample(dataset.images, max_images)
    return Dataset(dataset.name, tuple(chosen), dataset.notes)


PREPARATIONS: dict[str, Callable[[RungTask], None]] = {
    "make_set": make_set,
    "labelled": keep_labelled,
    "quantize": quantize,
    "export": export,
}
