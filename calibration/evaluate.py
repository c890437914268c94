"""Top-1 of a model set's members and of their average, over an ImageFolder."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
from rich.progress import track

from calibration.folder import LabelledFile, class_names, list_folder, read_pixels
from models.cpus import available_cpus
from models.ensemble import average
from models.errors import ModelSetError
from models.manifest import Precision
from models.model_set import ModelSet
from models.runtime import CompiledNetwork, Pixels, RuntimeOptions

BATCH = 8
Batch = list[tuple[LabelledFile, Pixels]]


@dataclass
class Evaluation:
    """What was measured, by member name and ``ensemble``."""

    num_images: int = 0
    float_type: str = ""  # of the layers that are not INT8 as they ran
    num_right: dict[str, int] = field(default_factory=dict)
    unreadable: list[str] = field(default_factory=list)

    @property
    def top1(self) -> dict[str, float]:
        """Fractions of the readable images whose likeliest class is right."""
        return {name: right / self.num_images for name, right in self.num_right.items()}


def evaluate(model_set: ModelSet, folder: Path, precision: Precision) -> Evaluation:
    """Run every image of ``folder`` through every member, streaming: memory does not grow.

    The folder's classes, sorted, must be as many as the set's: their order is the labels' order.
    """
    files = list_folder(folder)
    classes = class_names(files)
    manifest = model_set.manifest
    if len(classes) != manifest.num_classes:
        raise ModelSetError(
            f"{folder} has {len(classes)} classes, {manifest.name} has {manifest.num_classes}; "
            "give one sub-folder per class of the set, also for a class without images"
        )
    options = RuntimeOptions(
        num_threads=available_cpus(),
        batch_sizes=(BATCH,),
        is_f32_forced=precision == "FP16",  # the yardstick; INT8 is measured as it is served
    )
    networks = {
        member.name: CompiledNetwork(model_set.network_path(member.name, precision), options)
        for member in manifest.members
    }
    weights = {member.name: member.weight for member in manifest.members}
    float_types = {network.float_type for network in networks.values()}
    result = Evaluation(
        float_type=", ".join(sorted(float_types)),
        num_right=dict.fromkeys([*networks, "ensemble"], 0),
    )
    for batch in _batches(files, model_set, result, f"{manifest.name} {precision}"):
        truth = np.array([classes.index(file.class_name) for file, _ in batch])
        pixels = np.stack([image for _, image in batch])
        rows = {name: network.infer(pixels) for name, network in networks.items()}
        rows["ensemble"] = average(rows, weights)
        for name, probabilities in rows.items():
            result.num_right[name] += int((probabilities.argmax(1) == truth).sum())
        result.num_images += len(batch)
    if not result.num_images:
        raise ModelSetError(f"none of the {len(files)} images in {folder} can be read")
    return result


def _batches(
    files: list[LabelledFile], model_set: ModelSet, result: Evaluation, what: str
) -> Iterator[Batch]:
    shown = track(files, description=what, transient=True)
    read = read_pixels(shown, model_set.manifest.image.rule, result.unreadable)
    while batch := list(islice(read, BATCH)):
        yield batch
