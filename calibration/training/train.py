"""Trains the bundled set's float networks: ``python -m calibration.training.train --help``.

Continues from a checkpoint (``--init`` a state dict, or the run's own after an interruption) and
writes one after every epoch, so Ctrl-C costs at most the epoch that was running.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import cv2
import numpy as np
import numpy.typing as npt
import torch
import typer
from rich.console import Console
from rich.progress import track
from safetensors.torch import load_file

from calibration.datasets import folder_files
from calibration.sets.convert import (
    NETWORKS,
    build_network,
    half,
    load_weights,
    read_metadata,
    save_tensors,
)
from calibration.sets.input import MEAN_RGB, SCALE_RGB
from models.errors import ModelSetError, TandemError
from models.files import make_folder
from models.machine import available_cpus
from models.openvino_network import CompiledNetwork, Pixels, RuntimeOptions, read_network

Sizes = tuple[tuple[int, int], ...]  # (epochs, pixels)
Indices = npt.NDArray[np.int64]
console = Console(emoji=False)


@dataclass(frozen=True)
class Recipe:
    """Every hyperparameter: AdamW, a trapezoid learning rate, and growing image sizes."""

    sizes: Sizes = ((40, 96), (10, 128))
    batch_size: int = 64
    peak_rate: float = 1e-3
    warmup_epochs: float = 2.0
    decay_fraction: float = 0.5  # of all steps, at the end: linear to 1 % (Hägele 2024)
    weight_decay: float = 0.05  # only on matrices and kernels
    label_smoothing: float = 0.1
    min_area: float = 0.3  # of a random resized crop
    ema_decay: float = 0.998
    max_gradient_norm: float = 1.0
    seed: int = 20

    @property
    def num_epochs(self) -> int:
        """The number of epochs of all sizes."""
        return sum(epochs for epochs, _ in self.sizes)

    def size_at(self, epoch: int) -> int:
        """Return the image size of an epoch, in pixels."""
        for epochs, size in self.sizes:
            if epoch < epochs:
                return size
            epoch -= epochs
        return self.sizes[-1][1]

    def rate_at(self, progress: float) -> float:
        """Return the learning rate at ``progress`` (0..1): linear up, flat, linear down."""
        warmup = self.warmup_epochs / self.num_epochs
        if progress < warmup:
            return self.peak_rate * max(progress, 1e-3) / warmup
        left = min(1.0, (1 - progress) / self.decay_fraction)
        return self.peak_rate * max(left, 0.01)


def parse_sizes(text: str) -> Sizes:
    """Parse ``40x96,10x128`` (epochs x pixels)."""
    try:
        pairs = [part.split("x") for part in text.split(",")]
        return tuple((int(epochs), int(size)) for epochs, size in pairs)
    except ValueError:
        raise ModelSetError(
            f"{text!r} is not EPOCHSxPIXELS[,EPOCHSxPIXELS...], for example 40x96,10x128"
        ) from None


@dataclass(frozen=True)
class LabelledImages:
    """Images of any size, uint8 (H, W, 3) RGB, and the index of each one's class."""

    images: list[Pixels]
    labels: Indices  # (N,)
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.images)


def read_folders(folders: list[Path]) -> LabelledImages:
    """Decode every image of the folders into memory (about 100 KB each at 160 px)."""
    files = [file for folder in folders for file in folder_files(folder)]
    classes = tuple(sorted({name for _, name in files}))  # the order of the network's outputs
    images = []
    for path, _ in files:
        if (image := cv2.imread(str(path), cv2.IMREAD_COLOR_RGB)) is None:
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


class Teacher:
    """Knowledge distillation: a folded IR gives the target probabilities, at any image size.

    Function matching (Beyer et al. 2022, "Knowledge distillation: a good teacher is patient and
    consistent"): the student sees the same crop and mixture as the teacher, and learns all its
    probabilities. With a few thousand images these teach more than labels.
    """

    batch_size = 16

    def __init__(self, xml: Path) -> None:
        self._xml = xml
        self._network: CompiledNetwork | None = None

    def probabilities(self, batch: torch.Tensor) -> torch.Tensor:
        """Return float32 (N, C) probabilities for normalised float32 (N, 3, H, W) RGB."""
        network = self._at(batch.shape[-1])
        rgb = batch.permute(0, 2, 3, 1) * torch.tensor(SCALE_RGB) + torch.tensor(MEAN_RGB)
        pixels = rgb.round().clamp(0, 255).to(torch.uint8).numpy()[..., ::-1]  # BGR
        rows = [
            network.predict(np.ascontiguousarray(pixels[i : i + self.batch_size]))
            for i in range(0, len(pixels), self.batch_size)
        ]
        return torch.from_numpy(np.concatenate(rows))

    def _at(self, size: int) -> CompiledNetwork:
        if self._network is None or self._network.input_shape[0] != size:
            model = read_network(self._xml)
            model.reshape([-1, size, size, 3])
            options = RuntimeOptions(num_threads=available_cpus(), batch_sizes=(self.batch_size,))
            self._network = CompiledNetwork(model, options)
        return self._network


class Trainer:
    """Runs epochs; between them its whole state is on disk."""

    def __init__(
        self,
        name: str,
        num_classes: int,
        recipe: Recipe,
        run_dir: Path,
        teacher: Teacher | None = None,
    ) -> None:
        torch.manual_seed(recipe.seed)
        self.name, self.recipe, self.run_dir = name, recipe, run_dir
        self.network = build_network(name, num_classes).to(memory_format=torch.channels_last)
        self.average = build_network(name, num_classes).to(memory_format=torch.channels_last).eval()
        self.average.load_state_dict(self.network.state_dict())
        kernels = [p for p in self.network.parameters() if p.ndim > 1]
        others = [p for p in self.network.parameters() if p.ndim <= 1]
        groups = [
            {"params": kernels, "weight_decay": recipe.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=recipe.peak_rate, fused=True)
        self._teacher, self._is_bf16 = teacher, has_bf16()
        self.epoch = 0  # the next epoch

    @property
    def checkpoint(self) -> Path:
        """The file with the state between epochs."""
        return self.run_dir / f"{self.name}.checkpoint.safetensors"

    def start_from(self, path: Path) -> None:
        """Load weights only; the schedule starts from its beginning."""
        load_weights(self.network, path)
        self.average.load_state_dict(self.network.state_dict())

    def save(self) -> None:
        """Write the whole state (to resume), and the average in FP16 (to convert)."""
        state = {f"network.{k}": v for k, v in self.network.state_dict().items()}
        state |= {f"average.{k}": v for k, v in self.average.state_dict().items()}
        for index, slots in self.optimizer.state_dict()["state"].items():
            state |= {f"optimizer.{index}.{k}": v for k, v in slots.items()}
        save_tensors(state, self.checkpoint, {"epoch": self.epoch, "recipe": asdict(self.recipe)})
        average = half(self.average.state_dict())
        save_tensors(average, self.run_dir / f"{self.name}.safetensors", {"epoch": self.epoch})

    def resume(self) -> None:
        """Continue the run that :meth:`save` stored; its length may have changed since."""
        state = load_file(self.checkpoint)
        for part, network in (("network.", self.network), ("average.", self.average)):
            own = {k.removeprefix(part): v for k, v in state.items() if k.startswith(part)}
            network.load_state_dict(own)
        slots: dict[int, dict[str, torch.Tensor]] = {}
        for key, value in state.items():
            if key.startswith("optimizer."):
                _, index, slot = key.split(".")
                slots.setdefault(int(index), {})[slot] = value
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": slots, "param_groups": groups})
        # The fused optimizer needs moments with the same memory layout as their weights.
        for parameter, own_slots in self.optimizer.state.items():
            for slot, value in own_slots.items():
                if value.shape == parameter.shape:
                    own_slots[slot] = torch.empty_like(parameter).copy_(value)
        self.epoch = int(read_metadata(self.checkpoint)["epoch"])

    def run_epoch(self, data: LabelledImages) -> Iterator[float]:
        """Train an epoch, yielding each step's loss; samples depend only on seed and epoch."""
        rng = np.random.default_rng((self.recipe.seed, self.epoch))
        order = rng.permutation(len(data))
        num_steps = self.num_steps(data)
        for step in range(num_steps):
            chosen = order[step * self.recipe.batch_size : (step + 1) * self.recipe.batch_size]
            progress = (self.epoch + step / num_steps) / self.recipe.num_epochs
            for group in self.optimizer.param_groups:
                group["lr"] = self.recipe.rate_at(progress)
            yield self._step(data, chosen, rng)
        self.epoch += 1

    def num_steps(self, data: LabelledImages) -> int:
        """Return the number of steps of an epoch, without an incomplete last batch."""
        return max(1, len(data) // self.recipe.batch_size)

    def _step(self, data: LabelledImages, chosen: Indices, rng: np.random.Generator) -> float:
        recipe, size = self.recipe, self.recipe.size_at(self.epoch)
        crops = np.stack([random_crop(data.images[i], size, rng, recipe.min_area) for i in chosen])
        labels = torch.from_numpy(data.labels[chosen])
        targets = torch.nn.functional.one_hot(labels, len(data.classes)).float()
        batch, targets = mix(normalised(crops), targets, rng)
        self.network.train()
        with torch.autocast("cpu", torch.bfloat16, enabled=self._is_bf16):  # else float32
            logits = self.network(batch)
        smoothing = recipe.label_smoothing
        if self._teacher is not None:  # its probabilities replace the labels
            targets, smoothing = self._teacher.probabilities(batch), 0.0
        loss = torch.nn.functional.cross_entropy(logits.float(), targets, label_smoothing=smoothing)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), recipe.max_gradient_norm)
        self.optimizer.step()
        # Move the average's weights, and its batch-norm statistics, towards the network's.
        mine, theirs = self.average.state_dict(), self.network.state_dict()
        floats = [key for key, value in mine.items() if value.is_floating_point()]
        own, others = ([of[key] for key in floats] for of in (mine, theirs))
        with torch.no_grad():
            torch._foreach_lerp_(own, others, 1 - recipe.ema_decay)
        return float(loss.item())


def has_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether the CPU supports bfloat16 natively; emulated, it is many times slower."""
    try:
        flags = set(cpuinfo.read_text("utf-8").split())
    except OSError:
        return False
    return bool(flags & {"avx512_bf16", "amx_bf16"})


def train(
    network: Annotated[str, typer.Argument(help=f"one of {', '.join(NETWORKS)}")],
    images: Annotated[list[Path], typer.Option(help="ImageFolder(s) to train on", exists=True)],
    run_dir: Annotated[Path, typer.Option(help="where checkpoints and the log go")],
    init: Annotated[
        Path | None, typer.Option(help="state dict (safetensors) to start from", exists=True)
    ] = None,
    sizes: Annotated[str, typer.Option(help="EPOCHSxPIXELS, comma separated")] = "40x96,10x128",
    peak_rate: Annotated[float, typer.Option(help="learning rate")] = Recipe.peak_rate,
    teacher: Annotated[
        Path | None, typer.Option(help="folded IR whose answers are learnt instead of the labels")
    ] = None,
) -> None:
    """Train one float network; run again with the same --run-dir to resume."""
    data = read_folders(images)
    make_folder(run_dir)
    recipe = Recipe(sizes=parse_sizes(sizes), peak_rate=peak_rate)
    distilled_from = Teacher(teacher) if teacher else None
    trainer = Trainer(network, len(data.classes), recipe, run_dir, distilled_from)
    if trainer.checkpoint.exists():
        trainer.resume()
        console.print(f"resumed after epoch {trainer.epoch} of {recipe.num_epochs}")
    elif init is not None:
        trainer.start_from(init)
    while trainer.epoch < recipe.num_epochs:
        started, epoch, size = time.perf_counter(), trainer.epoch + 1, recipe.size_at(trainer.epoch)
        what = f"epoch {epoch}/{recipe.num_epochs} at {size} px"
        steps, total = trainer.run_epoch(data), trainer.num_steps(data)
        losses = list(track(steps, what, total, console=console, transient=True))
        seconds = round(time.perf_counter() - started, 1)
        loss = round(float(np.mean(losses)), 4)
        line = {"epoch": epoch, "px": size, "loss": loss, "seconds": seconds}
        trainer.save()
        with (run_dir / f"{network}.jsonl").open("a") as log:
            log.write(json.dumps(line) + "\n")
        console.print(json.dumps(line), soft_wrap=True)


if __name__ == "__main__":
    try:
        typer.run(train)
    except TandemError as error:
        console.print(error.message, style="red", markup=False, soft_wrap=True)
        raise SystemExit(2) from None
