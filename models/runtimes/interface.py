"""The interface that every runtime's networks have."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from models.ensemble import Probabilities
from models.errors import ModelSetError
from models.record import RuntimeName
from models.runtimes.options import Pixels


class LoadedNetwork(Protocol):
    """A network ready to run; several threads may call it at the same time."""

    version: str  # of the runtime's package
    num_threads: int  # that its batches share
    fixed_batch: int | None  # images, built into the file: the one batch size; None: any number
    input_shape: tuple[int, ...]  # (H, W, 3)
    num_classes: int
    float_type: str  # what the layers that are not INT8 compute in: f32 or bf16
    # Resident memory that loading it added, in bytes; of several that load at a time it is unknown
    # whose, and the first of a runtime has the runtime's own.
    memory_bytes: int

    @property
    def runtime(self) -> RuntimeName:
        """What runs it."""

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """What a queue forms, ascending."""

    @property
    def max_batch_size(self) -> int:
        """The largest batch that :meth:`predict` takes."""
        return self.batch_sizes[-1]

    @property
    def kernels(self) -> tuple[str, ...]:
        """The convolution kernels in use, the commonest first; empty: the runtime does not tell."""

    def predict(self, images: Pixels | Sequence[Pixels]) -> Probabilities:
        """Run uint8 (N, H, W, 3) BGR, or N of (H, W, 3), N up to ``max_batch_size``.

        A network whose batch size is built in takes any N, and runs that many at a time.

        Returns:
            float32 (N, C), the caller's own.

        Raises:
            ValueError: more or fewer images, of another shape, or no uint8.

        """

    def add_batch_size(self, size: int) -> None:
        """Take batches of one more size; it may take seconds, and other threads may predict.

        A network whose batch size is built in stays as it is.
        """

    def remove_batch_size(self, size: int) -> None:
        """Take back a size that was added and that no thread uses."""

    def check_fits(self, input_size: int, num_classes: int) -> None:
        """Raise :class:`ModelSetError` unless the network is what its manifest says."""
        sides, found = self.input_shape[:2], self.num_classes
        if (sides, found) != ((input_size, input_size), num_classes):
            raise ModelSetError(
                f"the network takes {sides[0]}x{sides[1]} and gives {found} classes; the manifest "
                f"says {input_size}x{input_size} and {num_classes}: mend the manifest"
            )

    def warm_up(self) -> None:
        """Run every batch size once: the first run allocates."""
        for size in self.batch_sizes:
            self.predict(np.zeros((size, *self.input_shape), np.uint8))


def check_image(image: Pixels, shape: tuple[int, ...]) -> None:
    """Raise :class:`ValueError` unless an image is uint8 of ``shape``.

    NumPy would cast another type, so that 0..1 become zeros, and repeat a smaller image.
    """
    if image.dtype != np.uint8:
        raise ValueError(f"a batch of {image.dtype}; the network takes uint8, 0 to 255")
    if image.shape != shape:
        raise ValueError(f"an image of {image.shape}; the network takes {shape}")
