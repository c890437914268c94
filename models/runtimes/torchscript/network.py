"""TorchScript on the CPU: a member's ``.torchscript``, run by PyTorch's own interpreter.

The file is one module with its preprocessing folded in: uint8 (N, H, W, 3) BGR to float32 (N, C)
probabilities. N may be built in. What its sides are is in ``extra/tandem.json``, since the code
does not say.
"""

import json
from pathlib import Path
from typing import Any, ClassVar

from models.errors import ModelSetError
from models.extras import needs_extra
from models.record import RuntimeName
from models.runtimes.options import RuntimeOptions
from models.runtimes.torch_batches import TorchBatches
from models.runtimes.torchscript.checked import checked_script
from models.runtimes.torchscript.errors import ScriptError

MAX_SIDE = 2**16  # px, and classes likewise


class ScriptNetwork(TorchBatches):
    """One frozen module, which any number of threads may run: it keeps no state between runs."""

    runtime: ClassVar[RuntimeName] = "torchscript"

    def __init__(self, path: Path, options: RuntimeOptions) -> None:
        """Check a file as data, write it anew, load and freeze that.

        Raises:
            MissingExtraError: torch is not installed.
            ModelSetError: it is no TorchScript, or does more than compute on tensors.

        """
        super().__init__(path, options)
        script = checked_script(path)
        batch, input_shape, num_classes = _sides(path, script.extra)
        with needs_extra("torch", f"{path.name}: a member that runs on PyTorch"):
            import torch

            from models.runtimes.torchscript import frozen
        example = torch.zeros((batch or 1, *input_shape), dtype=torch.uint8)
        self._module = frozen.optimized_module(script, frozen.loaded_module(script), example)
        self._use(torch, options.threads_each)
        self._takes(batch, input_shape, num_classes)

    def warm_up(self) -> None:
        """Run every batch size twice: PyTorch looks at the first run, and compiles by it."""
        super().warm_up()
        super().warm_up()

    def _forward(self, images: Any) -> Any:
        return self._module(images)


def _sides(path: Path, extra: bytes | None) -> tuple[int | None, tuple[int, ...], int]:
    """Return the built-in batch, (H, W, 3) and C that ``tandem models add`` noted."""
    if extra is None:
        raise ModelSetError(
            f"{path} is a TorchScript file that was not made by tandem models add: give it to that "
            "command, which folds the preprocessing in"
        )
    try:
        told = json.loads(extra)
        (batch, *shape), num_classes = told["input"], told["num_classes"]
        numbers = [*shape, num_classes, 1 if batch is None else batch]
        is_right = len(shape) == 3 and shape[2] == 3
        if not is_right or not all(type(n) is int and 0 < n <= MAX_SIDE for n in numbers):
            raise ValueError(f"input {told['input']}, {num_classes} classes")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ScriptError(f"{path} is damaged: extra/tandem.json: {error}") from error
    return batch, tuple(shape), num_classes
