"""Batches that PyTorch runs: threads of each caller, errors, and rows of its tensors."""

import threading
from abc import abstractmethod
from typing import Any

import numpy as np

from models.ensemble import Probabilities
from models.errors import ModelSetError
from models.runtimes.batches import BatchedNetwork
from models.runtimes.options import Pixels


class TorchBatches(BatchedNetwork):
    """What the two kinds of PyTorch's networks have in common, once ``_use`` was called."""

    def _use(self, torch: Any, threads_each: int) -> None:
        """Note the imported package, and how many threads work on one batch."""
        self._torch, self._threads_each = torch, threads_each
        self.version = str(torch.__version__).partition("+")[0]
        self._of_thread = threading.local()

    @abstractmethod
    def _forward(self, images: Any) -> Any:
        """Return the rows, a tensor (N, C), of images, a uint8 tensor (N, H, W, 3)."""

    def _run(self, batch: Pixels) -> Probabilities:
        torch = self._torch
        if getattr(self._of_thread, "num_threads", None) != self._threads_each:
            torch.set_num_threads(self._threads_each)  # of this thread's runs
            self._of_thread.num_threads = self._threads_each
        images = torch.from_numpy(batch if batch.flags.writeable else batch.copy())
        try:
            with torch.inference_mode():
                rows = self._forward(images)
        except (RuntimeError, TypeError, IndexError, ValueError) as error:
            raise ModelSetError(f"PyTorch cannot run {self.path}: {last_line(error)}") from error
        if tuple(rows.shape) != (len(batch), self.num_classes):
            told = f"{self.path} answers {tuple(rows.shape)} to {len(batch)} images"
            raise ModelSetError(told)
        found: Probabilities = rows.float().numpy()
        return np.array(found, np.float32)  # the caller's own, whatever tensor it was a view of


def last_line(error: Exception) -> str:
    """Return what an error of PyTorch says: TorchScript's put where in the code before it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].startswith("The following operation failed"):
        return lines[-1]
    return lines[0] if lines else type(error).__name__
