"""The interface of the ladder's runtimes: preparing, calling and evaluating a network."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from calibration.ladder.measure import NetworkCall
from calibration.ladder.rung import RungOptions, RungTask
from calibration.sets.fold import MEAN_RGB, SCALE_RGB
from models.ensemble import Probabilities
from models.errors import TandemError
from models.runtime import Pixels

SEED = 20
# A ladder's labelled images: the member's input, uint8 (N, H, W, 3); all members' inputs, as in
# models.image_inputs; the classes, int64 (N,).
PIXELS_NAME, INPUTS_NAME, TRUTH_NAME = (f"labelled-{n}.npy" for n in ("pixels", "inputs", "truth"))


class SkippedError(TandemError):
    """A rung that the machine or the installation cannot run; the message says why."""

    code = "skipped"


class ReadyNetwork(Protocol):
    """A network ready to run in one way."""

    @property
    def calls(self) -> Sequence[NetworkCall]:
        """Return a call for each caller, with its own input."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Return notes for readers of the figures."""

    def predict(self, pixels: Pixels) -> Probabilities:
        """Return float32 (N, C) probabilities or logits for uint8 (N, H, W, 3) BGR, N the batch."""


# Prepares a network for one way of running it; called for each of a task's choices.
MakeReady = Callable[[RungTask, RungOptions], ReadyNetwork]


def random_pixels(num_images: int, size: int, seed: int = SEED) -> Pixels:
    """Return uint8 (N, size, size, 3) BGR, the same for the same seed."""
    rng = np.random.default_rng(seed)
    # Coarse noise, enlarged: like pictures it has areas, while all white noise looks alike.
    coarse = rng.integers(0, 256, (num_images, -(-size // 16), -(-size // 16), 3), np.uint8)
    enlarged = coarse.repeat(16, axis=1).repeat(16, axis=2)[:, :size, :size]
    grain = rng.integers(0, 32, enlarged.shape, np.uint8)
    pixels: Pixels = np.maximum(enlarged, grain)
    return pixels


def normalised(pixels: Pixels) -> npt.NDArray[np.float32]:
    """Turn uint8 (N, H, W, 3) BGR into the networks' float32 (N, 3, H, W) RGB, contiguous."""
    rgb = pixels[..., ::-1].astype(np.float32)
    scaled = (rgb - np.array(MEAN_RGB, np.float32)) / np.array(SCALE_RGB, np.float32)
    return np.ascontiguousarray(scaled.transpose(0, 3, 1, 2))


def has_labelled(work: Path) -> bool:
    """Whether the work folder has labelled images, all of them decoded."""
    return (work / TRUTH_NAME).is_file()


def top1(
    network: ReadyNetwork, work: Path, batch: int, *, is_ensemble: bool = False
) -> tuple[float | None, int]:
    """Return the top-1 accuracy on the ladder's labelled images, and the number of images.

    (None, 0) without labelled images. The last batch is filled up with its first image.
    """
    if not has_labelled(work):
        return None, 0
    name = INPUTS_NAME if is_ensemble else PIXELS_NAME
    pixels = np.load(work / name, mmap_mode="r", allow_pickle=False)
    truth = np.load(work / TRUTH_NAME, allow_pickle=False)
    num_right = 0
    for start in range(0, len(truth), batch):
        part = np.array(pixels[start : start + batch])
        missing = batch - len(part)
        whole = np.concatenate([part, part[:1].repeat(missing, axis=0)]) if missing else part
        answers = network.predict(whole)[: len(part)].argmax(axis=1)
        num_right += int((answers == truth[start : start + batch]).sum())
    return round(num_right / len(truth), 4), len(truth)
