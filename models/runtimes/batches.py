"""Batches of a network that takes them as they are, or of one size only: no compiled sizes."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from models.ensemble import Probabilities
from models.record import RuntimeName
from models.runtimes.interface import check_fits
from models.runtimes.options import Pixels, RuntimeOptions


class BatchedNetwork(ABC):
    """What ONNX Runtime's and PyTorch's networks have in common: checks, and built-in batch sizes.

    Neither compiles for a size, so a batch runs as large as it is, unless the file has a batch size
    built in: then any number of images is taken, and runs that many at a time.
    """

    runtime: ClassVar[RuntimeName]
    float_type = "f32"
    memory_bytes = 0

    def __init__(self, path: Path, options: RuntimeOptions) -> None:
        self.path, self.num_threads = path, options.num_threads
        self.batch_sizes = tuple(sorted(set(options.batch_sizes)))
        self.version = ""
        self.fixed_batch: int | None = None  # images, built in; None: any number
        self.input_shape: tuple[int, ...] = ()
        self.num_classes = 0

    @abstractmethod
    def _run(self, batch: Pixels) -> Probabilities:
        """Run uint8 (N, H, W, 3), contiguous; N is ``fixed_batch`` if there is one."""

    def _takes(self, batch: int | None, input_shape: tuple[int, ...], num_classes: int) -> None:
        """Note what the file takes and gives."""
        self.input_shape, self.num_classes = input_shape, num_classes
        if batch is not None:
            self.fixed_batch, self.batch_sizes = batch, (batch,)

    @property
    def max_batch_size(self) -> int:
        """The largest batch that :meth:`predict` takes."""
        return self.batch_sizes[-1]

    def add_batch_size(self, size: int) -> None:
        """Take batches of one more size; a built-in one stays alone."""
        if self.fixed_batch is None:
            self.batch_sizes = tuple(sorted({*self.batch_sizes, size}))

    def remove_batch_size(self, size: int) -> None:
        """Take back a size that was added."""
        self.batch_sizes = tuple(of for of in self.batch_sizes if of != size)

    @property
    def kernels(self) -> tuple[str, ...]:
        """Nothing: the runtime does not tell."""
        return ()

    def predict(self, images: Pixels | Sequence[Pixels]) -> Probabilities:
        """Run uint8 (N, H, W, 3) BGR, or N of (H, W, 3), N up to ``max_batch_size``.

        Returns:
            float32 (N, C), the caller's own.

        Raises:
            ValueError: more or fewer images, of another shape, or no uint8.

        """
        num = len(images)
        if not num or (num > self.max_batch_size and self.fixed_batch is None):
            raise ValueError(f"a batch of {num} images; 1 to {self.max_batch_size} are taken")
        for image in images:
            if image.dtype != np.uint8:
                raise ValueError(f"a batch of {image.dtype}; the network takes uint8, 0 to 255")
            if image.shape != self.input_shape:
                told = f"an image of {image.shape}; the network takes {self.input_shape}"
                raise ValueError(told)
        batch = np.ascontiguousarray(images)  # (N, H, W, 3)
        return self._run(batch) if self.fixed_batch in (None, num) else self._in_parts(batch)

    def _in_parts(self, batch: Pixels) -> Probabilities:
        assert self.fixed_batch is not None
        size, num = self.fixed_batch, len(batch)
        filled = np.zeros((-(-num // size) * size, *self.input_shape), np.uint8)
        filled[:num] = batch
        parts = [self._run(filled[i : i + size]) for i in range(0, len(filled), size)]
        return np.concatenate(parts)[:num]

    def check_fits(self, input_size: int, num_classes: int) -> None:
        """Raise :class:`ModelSetError` unless the network is what its manifest says."""
        check_fits(self.input_shape, self.num_classes, input_size, num_classes)

    def warm_up(self) -> None:
        """Run every batch size once: the first run allocates."""
        for size in self.batch_sizes:
            self.predict(np.zeros((size, *self.input_shape), np.uint8))
