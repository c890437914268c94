"""PyTorch on the CPU: the extra ``torch``.

A member's file is an ExportedProgram (``.pt2``) with its preprocessing folded in: uint8
(N, H, W, 3) BGR to float32 (N, C) probabilities. N may be built in.
"""

from pathlib import Path
from typing import Any, ClassVar

from models.errors import ModelSetError
from models.extras import needs_extra
from models.record import RuntimeName
from models.runtimes.options import RuntimeOptions
from models.runtimes.torch_archive import read_archive
from models.runtimes.torch_batches import TorchBatches

UINT8 = 1  # torch._export.serde.schema.ScalarType.BYTE


class TorchNetwork(TorchBatches):
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
        self._program = Program(archive)
        self._use(torch, options.threads_each)
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

    def _forward(self, images: Any) -> Any:
        return self._program(images)
