"""Holds training images in memory, and augments them: random crops, mixed batches."""

from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import numpy.typing as npt
import torch

from calibration.datasets.labelled import folder_files
from calibration.sets.fold import MEAN_RGB, SCALE_RGB
from models.errors import ModelSetError
from models.runtime import Pixels


@dataclass(frozen=True)
class LabelledImages:
    """Images of any size, uint8 (H, W, 3) RGB, and the index of each one's class."""

    images: list[Pixels]
    labels: npt.NDArray[np.int64]  # (N,)
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.images)


def read_folders(folders: list[Path]) -> LabelledImages:
    """Decode every image of the folders into memory (about 100 KB each at 160 px)."""
    files = [file for folder in folders for file in folder_files(folder)]
    classes = tuple(sorted({name for _, name in files}))  # the order of the network's outputs
    images = []
    for path, _ in files:
        image = cv2.imread(str(path), cv2.IMREAD_COLOR_RGB)
        if image is None:
            raise ModelSetError(f"{path} cannot be decoded; remove it and start again")
        images.append(np.asarray(image, np.uint8))
    labels = np.array([classes.index(name) for _, name in files], np.int64)
    return LabelledImages(images, labels, classes)


def random_crop(image: Pixels, size: int, rng: np.random.Generator, min_area: float) -> Pixels:
    """Return a random resized crop with random flip and brightness.

    The area is ``min_area``..1, the aspect 3/4..4/3 (Szegedy 2014). Input and result are uint8 (H,
    W, 3) RGB; the result is ``size`` x ``size``.
    """
    height, width = image.shape[:2]
    area = height * width * rng.uniform(min_area, 1.0)
    aspect = np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3)))
    crop_w = min(width, max(1, round(np.sqrt(area * aspect))))
    crop_h = min(height, max(1, round(np.sqrt(area / aspect))))
    top = int(rng.integers(0, height - crop_h + 1))
    left = int(rng.integers(0, width - crop_w + 1))
    crop = image[top : top + crop_h, left : left + crop_w]
    how = cv2.INTER_AREA if crop_h > size and crop_w > size else cv2.INTER_LINEAR
    resized = cv2.resize(crop, (size, size), interpolation=how)
    if rng.random() < 0.5:
        resized = resized[:, ::-1]
    gain, bias = rng.uniform(0.7, 1.3), rng.uniform(-15, 15)
    brightened = cv2.convertScaleAbs(np.ascontiguousarray(resized), alpha=gain, beta=max(bias, 0.0))
    return np.asarray(brightened, np.uint8)


def some_crops(data: LabelledImages, num_crops: int, size: int) -> Pixels:
    """Return crops of different images, uint8 (N, size, size, 3) RGB, the same each time."""
    rng = np.random.default_rng(0)
    chosen = rng.choice(len(data), min(num_crops, len(data)), replace=False)
    return np.stack([random_crop(data.images[i], size, rng, 0.3) for i in chosen])


def normalised(pixels: Pixels) -> torch.Tensor:
    """Turn uint8 (N, H, W, 3) RGB into the networks' float32 (N, 3, H, W), channels last."""
    mean, scale = torch.tensor(MEAN_RGB), torch.tensor(SCALE_RGB)
    batch = ((torch.from_numpy(pixels).float() - mean) / scale).permute(0, 3, 1, 2)
    return batch.contiguous(memory_format=torch.channels_last)


def mix(
    batch: torch.Tensor, targets: torch.Tensor, rng: np.random.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply mixup (Zhang 2018) or CutMix (Yun 2019) to a quarter of the batches each.

    The other half stays unchanged. ``batch`` is float32 (N, 3, H, W), ``targets`` float32 (N, C)
    class probabilities.
    """
    draw = rng.random()
    if draw < 0.5:
        return batch, targets
    order = torch.from_numpy(rng.permutation(len(batch)))
    if draw < 0.75:
        share = float(rng.beta(0.4, 0.4))
        return batch.lerp(batch[order], 1 - share), targets.lerp(targets[order], 1 - share)
    height, width = batch.shape[2:]
    side = np.sqrt(rng.uniform(0.0, 0.7))
    cut_h, cut_w = round(height * side), round(width * side)
    top, left = int(rng.integers(0, height - cut_h + 1)), int(rng.integers(0, width - cut_w + 1))
    rows, columns = slice(top, top + cut_h), slice(left, left + cut_w)
    mixed = batch.clone()
    mixed[:, :, rows, columns] = batch[order][:, :, rows, columns]
    share = 1 - cut_h * cut_w / (height * width)
    return mixed, targets.lerp(targets[order], 1 - share)
