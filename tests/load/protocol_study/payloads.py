"""What is sent: photographs as files, or as the pixels that a network takes."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from models.image import read_image
from models.record import ImageRecord

Pixels = npt.NDArray[np.uint8]
NUM_PHOTOS = 32


@dataclass(frozen=True)
class Payloads:
    """A few photographs, in turn."""

    files: Sequence[bytes]  # JPEG
    image: ImageRecord  # how the served set makes pixels of a file
    num_classes: int

    @cached_property
    def pixels(self) -> list[Pixels]:
        """Each file as uint8 (H, W, 3), BGR, at the size of the networks."""
        return [read_image(file, self.image.rule) for file in self.files]

    def chosen(self, number: int, batch: int) -> list[int]:
        """Return which photographs the ``number``-th request has."""
        return [(number * batch + place) % len(self.files) for place in range(batch)]

    def files_of(self, number: int, batch: int) -> list[bytes]:
        return [self.files[n] for n in self.chosen(number, batch)]

    def pixels_of(self, number: int, batch: int) -> Pixels:
        """Return uint8 (batch, H, W, 3), BGR."""
        return np.stack([self.pixels[n] for n in self.chosen(number, batch)])
