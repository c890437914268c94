"""Knowledge distillation: a served network gives the target probabilities for training.

Function matching (Beyer et al. 2022, "Knowledge distillation: a good teacher is patient and
consistent"): the student sees the same crop and mixture as the teacher, and learns all its
probabilities. With a few thousand images these teach more than labels.
"""

from pathlib import Path

import numpy as np
import torch

from calibration.sets.fold import MEAN_RGB, SCALE_RGB
from models.cpus import available_cpus
from models.runtime import CompiledNetwork, RuntimeOptions, read_network

BATCH = 16


class Teacher:
    """A folded IR, which runs at any size that the student trains at."""

    def __init__(self, xml: Path) -> None:
        self._xml = xml
        self._network: CompiledNetwork | None = None

    def probabilities(self, batch: torch.Tensor) -> torch.Tensor:
        """Return float32 (N, C) probabilities for normalised float32 (N, 3, H, W) RGB."""
        network = self._at(batch.shape[-1])
        rgb = batch.permute(0, 2, 3, 1) * torch.tensor(SCALE_RGB) + torch.tensor(MEAN_RGB)
        pixels = rgb.round().clamp(0, 255).to(torch.uint8).numpy()[..., ::-1]  # BGR
        rows = [
            network.predict(np.ascontiguousarray(pixels[i : i + BATCH]))
            for i in range(0, len(pixels), BATCH)
        ]
        return torch.from_numpy(np.concatenate(rows))

    def _at(self, size: int) -> CompiledNetwork:
        if self._network is None or self._network.input_shape[0] != size:
            model = read_network(self._xml)
            model.reshape([-1, size, size, 3])
            options = RuntimeOptions(num_threads=available_cpus(), batch_sizes=(BATCH,))
            self._network = CompiledNetwork(model, options)
        return self._network
