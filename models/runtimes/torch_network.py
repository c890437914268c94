"""PyTorch on the CPU: the extra ``torch``.

A member's file is an ExportedProgram (``.pt2``) with its preprocessing folded in: uint8
(N, H, W, 3) BGR to float32 (N, C) probabilities. N may be built in.
"""

import threading
from pathlib import Path
from typing import ClassVar

import numpy as np

from models.ensemble import Probabilities
from models.errors import ModelSetError
from models.extras import needs_extra
from models.record import RuntimeName
from models.runtimes.batches import BatchedNetwork
from models.runtimes.options import Pixels, RuntimeOptions
from models.runtimes.torch_archive import read_archive

UINT8 = 1  # torch._export.serde.schema.ScalarType.BYTE


class TorchNetwork(BatchedNetwork):
    """One program, which any number of threads may run: it keeps no state between runs."""

    runtime: ClassVar[RuntimeName] = "torch"

    def __init__(self, path: Path, options: RuntimeOptions) -> None:
        """Load a .pt2.

        Raises:
            MissingExtraError: torch is not installed.
            ModelSetError: it is no such program, or more than a network.

        """
        super().__init__(path, options)
        archive = read_archive(path)
        with needs_extra("torch", f"{path.name}: a member that runs on PyTorch"):
            import torch

            from models.runtimes.torch_program import Program
        self._torch, self._program = torch, Program(archive)
        self.version = str(torch.__version__).partition("+")[0]
        self._threads_each = options.threads_each
        self._of_thread = threading.local()
        self._check_ends()

    def _check_ends(self) -> None:
        taken, given = self._program.input, self._program.output
        sides = [side.get("as_int") for side in taken["sizes"]]
        if taken["dtype"] != UINT8 or len(sides) != 4 or sides[3] != 3 or None in sides[1:]:
            raise ModelSetError(
                f"{self.path} takes {sides} of ScalarType {taken['dtype']}; a member takes uint8 "
                "[N,H,W,3] with H and W fixed: tandem models add folds the preprocessing in"
            )
        classes = [side.get("as_int") for side in given["sizes"]][1:]
        if len(classes) != 1 or classes[0] is None:
            raise ModelSetError(f"{self.path} gives {given['sizes']}; a member gives [N,C]")
        self._takes(sides[0], tuple(sides[1:]), classes[0])

    def _run(self, batch: Pixels) -> Probabilities:
        torch = self._torch
        if getattr(self._of_thread, "num_threads", None) != self._threads_each:
            torch.set_num_threads(self._threads_each)  # of this thread's runs
            self._of_thread.num_threads = self._threads_each
        images = torch.from_numpy(batch if batch.flags.writeable else batch.copy())
        try:
            with torch.inference_mode():
                rows = self._program(images)
        except (RuntimeError, TypeError, IndexError, ValueError) as error:
            first_line = str(error).strip().partition("\n")[0]
            raise ModelSetError(f"PyTorch cannot run {self.path}: {first_line}") from error
        if tuple(rows.shape) != (len(batch), self.num_classes):
            told = f"{self.path} answers {tuple(rows.shape)} to {len(batch)} images"
            raise ModelSetError(told)
        found: Probabilities = rows.float().numpy()
        return np.array(found, np.float32)  # the caller's own, whatever tensor it was a view of
