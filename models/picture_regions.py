"""Regions of a picture: their form in requests, and where they lie among a picture's pixels.

A region is ``[x, y, width, height]`` of the picture as it is shown (turned upright), in pixels or
in shares of its sides. Four numbers up to 1 are shares: ``[0, 0, 1, 1]`` is the whole picture.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from models.errors import OutsidePictureError

MAX_REGIONS = 64
FORM = "[x, y, width, height] in whole pixels, or in shares of 0 to 1"
ROUNDING = 1e-6  # by which shares may add up to more than 1
Edges = tuple[int, int, int, int]  # left, top, right, bottom


class PictureRegion(NamedTuple):
    """A part of a picture: pixels, or shares of its sides if no number is above 1."""

    x: float
    y: float
    width: float
    height: float

    @property
    def is_shares(self) -> bool:
        return max(self) <= 1

    def __str__(self) -> str:
        return f"[{', '.join(f'{number:.6g}' for number in self)}]"

    def num_pixels(self, of_picture: int) -> int:
        """Return how many pixels the region has, in a picture of ``of_picture`` pixels."""
        area = self.width * self.height
        return int(min(area * of_picture if self.is_shares else area, of_picture))

    def problem(self) -> str | None:
        """Return why the region is wrong in every picture; None if it is not."""
        if not all(map(math.isfinite, self)) or min(self) < 0 or min(self.width, self.height) == 0:
            return "its x and y are 0 or more, its width and height above 0"
        if not self.is_shares:
            is_whole = all(float(number).is_integer() for number in self)
            return None if is_whole else "pixels are whole numbers, and shares end at 1"
        if (far := max(self.x + self.width, self.y + self.height)) > 1 + ROUNDING:
            return f"it reaches to {far:.6g} of a side, and shares end at 1"
        return None

    def within(self, width: int, height: int) -> Edges:
        """Return the edges in a picture of ``width`` x ``height`` pixels.

        Raises :class:`OutsidePictureError` if the region is not within, or has no pixel.
        """
        wide, high = (width, height) if self.is_shares else (1, 1)
        left, right = (round(edge * wide) for edge in (self.x, self.x + self.width))
        top, bottom = (round(edge * high) for edge in (self.y, self.y + self.height))
        if right > width or bottom > height:
            raise OutsidePictureError(
                f"The region {self} reaches to x {right} and y {bottom}; the picture has {width} x "
                f"{height} pixels as it is shown: keep within them."
            )
        if left == right or top == bottom:
            raise OutsidePictureError(
                f"The region {self} has no pixel of {width} x {height}: send a larger one."
            )
        return left, top, right, bottom


def regions_of(sent: Any, most: int = MAX_REGIONS) -> tuple[PictureRegion, ...]:
    """Return the regions of a request, ``sent`` as lists of four numbers.

    Raises :class:`ValueError`, whose text has the value, the limit and what to send.
    """
    if not isinstance(sent, Sequence) or isinstance(sent, str) or not sent:
        raise ValueError(f"regions is {_shown(sent)}; give a list of {FORM}")
    if len(sent) > most:
        raise ValueError(
            f"regions has {len(sent)} entries, the limit is {most}; send them in several requests"
        )
    return tuple(_region(place, numbers) for place, numbers in enumerate(sent))


def _region(place: int, numbers: Any) -> PictureRegion:
    name = f"region {place} (counted from 0)"
    is_list = isinstance(numbers, Sequence) and not isinstance(numbers, str)
    if not is_list or len(numbers) != 4 or not all(map(_is_number, numbers)):
        raise ValueError(f"{name} is {_shown(numbers)}; give {FORM}")
    region = PictureRegion(*numbers)
    if (problem := region.problem()) is not None:
        raise ValueError(f"{name} is {region}; {problem}; give {FORM}")
    return region


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
