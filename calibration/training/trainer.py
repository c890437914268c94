"""Trains one network: its weights, their moving average, the optimizer, checkpoints."""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file

from calibration.sets.networks import build_network, half, load_weights, read_metadata, save_tensors
from calibration.training.augment import LabelledImages, mix, normalised, random_crop
from calibration.training.recipe import Recipe
from calibration.training.teacher import Teacher
from models.runtime import Pixels

Indices = npt.NDArray[np.int64]


class Trainer:
    """Runs epochs; between them its whole state is on disk."""

    def __init__(
        self,
        name: str,
        num_classes: int,
        recipe: Recipe,
        run_dir: Path,
        teacher: Teacher | None = None,
        build: Callable[[str, int], torch.nn.Module] = build_network,
    ) -> None:
        """``build(name, num_classes)``: float32 (N, 3, H, W) RGB to logits; torchvision's."""
        torch.manual_seed(recipe.seed)
        self.name, self.recipe, self.run_dir = name, recipe, run_dir
        self.network = build(name, num_classes).to(memory_format=torch.channels_last)
        self.average = build(name, num_classes).to(memory_format=torch.channels_last).eval()
        self.average.load_state_dict(self.network.state_dict())
        kernels = [p for p in self.network.parameters() if p.ndim > 1]
        others = [p for p in self.network.parameters() if p.ndim <= 1]
        groups = [
            {"params": kernels, "weight_decay": recipe.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=recipe.peak_rate, fused=True)
        self._is_bf16 = has_bf16()
        self._teacher = teacher
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

    def run_epoch(self, data: LabelledImages, max_steps: int | None = None) -> Iterator[float]:
        """Train an epoch, yielding each step's loss; samples depend only on seed and epoch."""
        rng = np.random.default_rng((self.recipe.seed, self.epoch))
        order = rng.permutation(len(data))
        num_steps = self.num_steps(data, max_steps)
        for step in range(num_steps):
            chosen = order[step * self.recipe.batch_size : (step + 1) * self.recipe.batch_size]
            self._set_rate((self.epoch + step / num_steps) / self.recipe.num_epochs)
            yield self._step(data, chosen, rng)
        self.epoch += 1

    def num_steps(self, data: LabelledImages, max_steps: int | None = None) -> int:
        """Return the number of steps of an epoch, without an incomplete last batch."""
        full = max(1, len(data) // self.recipe.batch_size)
        return full if max_steps is None else min(full, max_steps)

    def _set_rate(self, progress: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.rate_at(progress)

    def _step(self, data: LabelledImages, chosen: Indices, rng: np.random.Generator) -> float:
        recipe, size = self.recipe, self.recipe.size_at(self.epoch)
        crops = np.stack([random_crop(data.images[i], size, rng, recipe.min_area) for i in chosen])
        labels = torch.from_numpy(data.labels[chosen])
        targets = torch.nn.functional.one_hot(labels, len(data.classes)).float()
        batch, targets = mix(normalised(crops), targets, rng)
        self.network.train()
        with self._autocast():
            logits = self.network(batch)
        smoothing = recipe.label_smoothing
        if self._teacher is not None:  # its probabilities replace the labels
            targets, smoothing = self._teacher.probabilities(batch), 0.0
        loss = torch.nn.functional.cross_entropy(logits.float(), targets, label_smoothing=smoothing)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), recipe.max_gradient_norm)
        self.optimizer.step()
        self._update_average()
        return float(loss.item())

    def _autocast(self) -> torch.autocast:
        """Compute in bfloat16 if the CPU supports it, else in float32."""
        return torch.autocast("cpu", torch.bfloat16, enabled=self._is_bf16)

    def _update_average(self) -> None:
        """Move the average's weights, and its batch-norm statistics, towards the network's."""
        mine, theirs = self.average.state_dict(), self.network.state_dict()
        floats = [key for key, value in mine.items() if value.is_floating_point()]
        with torch.no_grad():
            torch._foreach_lerp_(
                [mine[key] for key in floats],
                [theirs[key] for key in floats],
                1 - self.recipe.ema_decay,
            )

    def accuracy(self, pixels: Pixels, labels: Indices) -> float:
        """Return the top-1 of the weights' moving average on uint8 (N, H, W, 3) RGB."""
        right = 0
        for start in range(0, len(pixels), 64):
            part = slice(start, start + 64)
            with torch.no_grad(), self._autocast():
                logits = self.average(normalised(pixels[part]))
            right += int((logits.argmax(1).numpy() == labels[part]).sum())
        return right / len(pixels)


def has_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether the CPU supports bfloat16 natively; emulated, it is many times slower."""
    try:
        flags = set(cpuinfo.read_text("utf-8").split())
    except OSError:
        return False
    return bool(flags & {"avx512_bf16", "amx_bf16"})
