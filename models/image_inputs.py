"""The members' inputs from a picture, which is decoded once; each distinct input is made once.

Members with equal inputs share them. If all are equal, an image is uint8 (H, W, 3) and a batch (N,
H, W, 3). Otherwise an image is uint8 (B,): the distinct inputs one after another, and a batch is
(N, B). Both are stacked and sliced alike. :meth:`ImageInputs.of` returns a member's part.
"""

from collections.abc import Mapping, Sequence

import cv2
import numpy as np
from numpy.typing import NDArray

from models.image import (
    COLORS,
    DEFAULT_MAX_FULL_PIXELS,
    DEFAULT_MAX_PIXELS,
    CheckedImage,
    ImageRule,
    check_image,
    decode_images,
)

Pixels = NDArray[np.uint8]


class ImageInputs:
    """Makes the inputs of a set's members from a picture, by each member's image rule."""

    def __init__(self, rules: Mapping[str, ImageRule]) -> None:
        self.rules = tuple(dict.fromkeys(rules.values()))  # distinct
        # A reduced scale that suits the largest suits all.
        self._largest = max(self.rules, key=lambda rule: rule.resize_shorter)
        ends = np.cumsum([rule.num_bytes for rule in self.rules]).tolist()
        self.num_bytes: int = ends[-1]  # per image
        self._parts = {
            name: (ends[place := self.rules.index(rule)] - rule.num_bytes, ends[place], rule)
            for name, rule in rules.items()
        }

    def check(
        self,
        data: bytes | memoryview,
        *,
        max_pixels: int = DEFAULT_MAX_PIXELS,
        max_full_pixels: int = DEFAULT_MAX_FULL_PIXELS,
    ) -> CheckedImage:
        """Read a file's header and check the limits; see :func:`models.image.check_image`."""
        return check_image(
            data, self._largest, max_pixels=max_pixels, max_full_pixels=max_full_pixels
        )

    def decode(self, data: bytes | memoryview, checked: CheckedImage) -> Pixels:
        """Decode a checked file.

        Returns:
            uint8 BGR, (H, W, 3), or (B,) if the members' inputs differ.

        Raises:
            CorruptImageError: the file is damaged.
            TandemError: OpenCV could not get the memory it needs.

        """
        flat = decode_images(data, self.rules, checked)
        return flat if len(self.rules) > 1 else _squares(flat, self.rules[0].input_size)

    def read(self, data: bytes | memoryview) -> Pixels:
        """Check a file with the usual limits and decode it; see :func:`models.image.read_image`."""
        return self.decode(data, self.check(data))

    def warm_up(self) -> None:
        """Read a small picture, since the first one has to import and set up."""
        _, file = cv2.imencode(".jpg", np.zeros((8, 8, COLORS), np.uint8))
        self.read(file.tobytes())

    def of(self, member: str, images: Pixels) -> Pixels:
        """Return a member's part of a batch: (N, H, W, 3), a view.

        A batch of (N, H, W, 3) is every member's input. With several views per image there is an
        axis for them after the first: (N, V, B) or (N, V, H, W, 3).
        """
        if images.ndim > 3:
            return images
        first, end, rule = self._parts[member]
        return _squares(images[..., first:end], rule.input_size)

    def split(self, images: Pixels) -> list[Pixels]:
        """Return a batch's distinct inputs, each (N, H, W, 3), in the order of ``rules``."""
        if images.ndim > 3:
            return [images]
        return [
            _squares(images[..., first:end], rule.input_size)
            for first, end, rule in dict.fromkeys(self._parts.values())
        ]

    @staticmethod
    def joined(parts: Sequence[Pixels]) -> Pixels:
        """Return the batch of these inputs, each (..., H, W, 3); several are joined as (..., B)."""
        if len(parts) == 1:
            return parts[0]
        return np.concatenate([part.reshape(*part.shape[:-3], -1) for part in parts], axis=-1)

    def none(self) -> Pixels:
        """Return a batch with no images."""
        if len(self.rules) > 1:
            return np.empty((0, self.num_bytes), np.uint8)
        return np.empty((0, *self.rules[0].shape), np.uint8)


def _squares(images: Pixels, size: int) -> Pixels:
    return images.reshape(*images.shape[:-1], size, size, COLORS)
