"""TorchScript files made in code, as their users make them."""

import json
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.tiny_networks import SIZE


@contextmanager
def quiet() -> Iterator[None]:
    """Leave out that torch.jit is not developed any more, and what the tracer guesses."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def traced(module: Any, sides: tuple[int, ...], *, is_float: bool = False) -> Any:
    """Trace a module with zeros, uint8 unless told otherwise."""
    import torch

    example = torch.zeros(sides, dtype=torch.float32 if is_float else torch.uint8)
    with quiet():
        return torch.jit.trace(module, example, check_trace=False)


def scripted(module: Any) -> Any:
    import torch

    with quiet():
        return torch.jit.script(module)


def frozen(module: Any) -> Any:
    import torch

    with quiet():
        return torch.jit.freeze(module)


def save_script(module: Any, path: Path, extra: dict[str, Any] | None = None) -> Path:
    """Write a scripted or traced module; ``extra`` is what ``models add`` noted of it once."""
    import torch

    files = {} if extra is None else {"tandem.json": json.dumps(extra)}
    with quiet():
        torch.jit.save(module, str(path), _extra_files=files)
    return path


def write_tiny_script(path: Path, gain: float = 4.0, batch: int | None = None) -> Path:
    """Write what :func:`tests.support.runtime_files.tiny_onnx` computes, as sets had it once."""
    import torch

    class Tiny(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("gain", torch.full((3,), gain / 255))

        def forward(self, pixels: Any) -> Any:
            return torch.softmax(pixels.float().mean((1, 2)).reshape(batch or -1, 3) * self.gain, 1)

    made = traced(Tiny().eval(), (batch or 2, SIZE, SIZE, 3))
    return save_script(made, path, {"input": [batch, SIZE, SIZE, 3], "num_classes": 3})


def write_float_script(path: Path, gain: float = 4.0, how: str = "trace", batch: int = 0) -> Path:
    """Write what :func:`tests.support.runtime_files.float_onnx` computes, as its users would.

    Args:
        path: of the file.
        gain: before softmax.
        how: trace or script, or that and frozen: trace+freeze.
        batch: images, built in; 0: any number.

    """
    import torch

    class Means(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = torch.nn.Parameter(torch.full((3,), gain))
            self.batch = batch or -1

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return image.mean((2, 3)).view(self.batch, 3) * self.gain

    module = Means().eval()
    sides = (batch or 2, 3, SIZE, SIZE)
    made = traced(module, sides, is_float=True) if "trace" in how else scripted(module)
    return save_script(frozen(made) if "freeze" in how else made, path)


class TouchesWhenLoaded:
    """A pickle of it makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def pickled_attack(path: Path) -> bytes:
    """Return a pickle that makes the file ``path`` when it is loaded."""
    return pickle.dumps(TouchesWhenLoaded(path), protocol=2)
