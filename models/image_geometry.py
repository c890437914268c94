"""Geometry of pictures: the regions that requests name, and the antialiased resize of a crop.

A region is ``[x, y, width, height]`` of the picture as it is shown (turned upright), in pixels or
in shares of its sides. Four numbers up to 1 are shares: ``[0, 0, 1, 1]`` is the whole picture.

The resize has the results of Pillow's BILINEAR and BICUBIC filters. A result pixel is a weighted
mean of source pixels under a triangle. The triangle is two source-to-result scales wide (one pixel
each side when enlarging). This is Pillow's ``ImagingResample``, and so torchvision's classification
preprocessing. The axes are resized one after the other, on the crop alone, in 16-bit integers.
Weights are in 1/256 and sum to 256, so a sum is at most 255 * 256 + 128 < 2**16.

The bicubic kernel (a = -0.5, twice as wide) has negative weights. It uses 32-bit integers with
weights in 1/2**14, and its sums are clipped to 0..255.

Resizing along an axis multiplies a sparse matrix (size, source rows) by the rows. SciPy adds a
multiple of a row to another in one step, while NumPy would copy each row first (decision 0001).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from models.errors import OutsidePictureError

if TYPE_CHECKING:
    from scipy.sparse import csr_array

MAX_REGIONS = 64
FORM = "[x, y, width, height] in whole pixels, or in shares of 0 to 1"
ROUNDING = 1e-6  # by which shares may add up to more than 1
Edges = tuple[int, int, int, int]  # left, top, right, bottom
# With more taps, weights of 8 bits are too coarse. A larger shrink starts with means over whole
# blocks, which leaves a factor of 4 to 8 for the triangle (decision 0001).
_MAX_TRIANGLE_SHRINK = 8
_CACHED_AXES = 1024  # about 10 KB each
_BITS = {"bilinear": 8, "bicubic": 14}  # of a weight
_TYPES = {"bilinear": np.uint16, "bicubic": np.int32}

Pixels = NDArray[np.uint8]
Wide = NDArray[Any]  # pixels in the type of the weights: uint16, or int32
Interpolation = Literal["bilinear", "bicubic"]


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


class Axis(NamedTuple):
    """The position of the crop along an axis of the source.

    The whole source (``length`` pixels) would become ``length / scale`` pixels. The crop is
    ``size`` of these, from ``offset`` on. It has no weight of source pixels outside of ``ends``.
    """

    length: int
    scale: float
    offset: float
    size: int
    interpolation: Interpolation
    ends: tuple[int, int]


@dataclass(frozen=True)
class _Taps:
    """Rows ``first:stop`` of the source, and the weights that make each output row."""

    first: int
    stop: int
    block: int  # rows that are averaged first
    weights: "csr_array[Any]"  # (size, blocks), uint16 or int32; a row adds up to 2**bits
    bits: int


class CropSource:
    """The source pixels of a picture's crops, (rows, columns, 3) uint8, widened once for all crops.

    ``region`` is the source's :func:`common_region`, opaque, with its colours in any order.
    """

    def __init__(self, region: Pixels, first_row: int, first_column: int) -> None:
        self._region, self._first_row, self._first_column = region, first_row, first_column
        self._widened: dict[np.dtype[Any], Wide] = {}

    def resize(self, y: Axis, x: Axis, out: Pixels | None = None) -> Pixels:
        """Return a crop, (y.size, x.size, 3) uint8; ``out``: a contiguous array for it."""
        down, across = _taps(y), _taps(x)
        if out is None:
            out = np.empty((y.size, x.size, 3), np.uint8)
        rows = slice(down.first - self._first_row, down.stop - self._first_row)
        columns = slice(across.first - self._first_column, across.stop - self._first_column)
        if down.block > 1 or across.block > 1:
            blocks = _block_means(self._region[rows, columns], down.block, across.block)
            wide, columns = blocks.astype(down.weights.dtype), slice(None)
        else:
            wide = self._wide(down.weights.dtype)[rows]
        if y.interpolation == "bicubic":  # in Pillow's order: sums are clipped in between
            half = _combined(_transposed(wide)[columns], across)  # (x.size, rows, 3)
            out[...] = _combined(_transposed(half), down)
        else:
            half = _transposed(_combined(wide, down))[columns]  # (columns, y.size, 3)
            cv2.transpose(_combined(half, across).astype(np.uint8), out)
        return out

    def _wide(self, dtype: "np.dtype[Any]") -> Wide:
        if dtype not in self._widened:
            self._widened[dtype] = self._region.astype(dtype)
        return self._widened[dtype]


def common_region(crops: Iterable[tuple[Axis, Axis]]) -> tuple[slice, slice]:
    """Return the source's rows and columns that all crops, each (y, x), need together."""
    taps = [(_taps(y), _taps(x)) for y, x in crops]
    down, across = taps[0]
    first, stop, left, right = down.first, down.stop, across.first, across.stop
    for down, across in taps[1:]:
        first, stop = min(first, down.first), max(stop, down.stop)
        left, right = min(left, across.first), max(right, across.stop)
    return slice(first, stop), slice(left, right)


def _block_means(region: Pixels, rows: int, columns: int) -> Pixels:
    """Average blocks of ``rows`` x ``columns`` pixels; the last blocks may be smaller."""
    height, width = region.shape[:2]
    if 0 < (whole := height - height % rows) < height:
        parts = [_block_means(part, rows, columns) for part in np.split(region, [whole])]
        return np.concatenate(parts)
    if 0 < (whole := width - width % columns) < width:
        parts = [_block_means(part, rows, columns) for part in np.split(region, [whole], axis=1)]
        return np.concatenate(parts, axis=1)
    size = -(-width // columns), -(-height // rows)
    return np.asarray(cv2.resize(region, size, interpolation=cv2.INTER_AREA), np.uint8)


def _transposed(pixels: Wide) -> Wide:
    """Transpose rows and columns in memory, which OpenCV does faster than NumPy."""
    return np.asarray(cv2.transpose(pixels))


def _combined(pixels: Wide, taps: _Taps) -> Wide:
    """Combine rows: (source rows, width, 3) of 0..255 -> (size, width, 3) of 0..255."""
    source = pixels[: taps.weights.shape[1]]  # the last rows may have no weight
    total: Wide = taps.weights @ source.reshape(source.shape[0], -1)  # (size, width * 3)
    total += 1 << (taps.bits - 1)
    total >>= taps.bits
    if total.dtype == np.int32:
        np.clip(total, 0, 255, out=total)
    return total.reshape(-1, *pixels.shape[1:])


@lru_cache(maxsize=_CACHED_AXES)
def _taps(axis: Axis) -> _Taps:
    """Compute the kernel's weights for each output row (Pillow's ``precompute_coeffs``)."""
    kind = axis.interpolation
    block = int(axis.scale / 4) if axis.scale > _MAX_TRIANGLE_SHRINK else 1
    scale, length = axis.scale / block, -(-axis.length // block)
    stretch = max(scale, 1.0)
    reach = stretch if kind == "bilinear" else 2 * stretch
    centre = (axis.offset + np.arange(axis.size) + 0.5) * scale  # (size,)
    start, end = axis.ends[0] // block, -(-axis.ends[1] // block)
    low = np.maximum((centre - reach + 0.5).astype(np.intp), start)
    high = np.minimum((centre + reach + 0.5).astype(np.intp), end)
    first, stop = int(low[0]), int(high[-1])
    rows = low + np.arange(int((high - low).max()))[:, None]  # (taps, size)
    last = axis.length / block - (length - 1)  # the last block's size, relative to a whole one
    part = np.where(rows == length - 1, last, 1.0)
    weights = _kernel(np.abs(rows + (part / 2 - centre)) / stretch, kind) * part * (rows < high)
    whole = _as_integers(weights / weights.sum(axis=0), _BITS[kind]).astype(_TYPES[kind])
    return _Taps(first * block, stop * block, block, _matrix(rows - first, whole), _BITS[kind])


def _matrix(columns: NDArray[np.intp], weights: NDArray[Any]) -> "csr_array[Any]":
    """Return the sparse matrix that makes output rows from source rows.

    ``columns`` (taps, size) are the source rows of each output row, and ``weights`` (taps, size)
    the weight of each; zeros are left out.
    """
    from scipy.sparse import csr_array  # 8 MB and 0.06 s, only if images are read

    is_used = weights.T != 0
    starts = np.concatenate([[0], np.cumsum(is_used.sum(axis=1))]).astype(np.int32)
    used = columns.T[is_used].astype(np.int32)
    return csr_array((weights.T[is_used], used, starts), (len(is_used), int(used.max()) + 1))


def _kernel(distance: NDArray[np.float64], kind: Interpolation) -> NDArray[np.float64]:
    """Return Pillow's triangle, or its cubic (a = -0.5), at distances of 0 and more."""
    if kind == "bilinear":
        return np.maximum(1 - distance, 0)
    near = (1.5 * distance - 2.5) * distance**2 + 1
    far = -0.5 * (((distance - 5) * distance + 8) * distance - 4)
    return np.where(distance < 1, near, np.where(distance < 2, far, 0))


def _as_integers(weights: NDArray[np.float64], bits: int) -> NDArray[np.int64]:
    """Round weights (taps, size) to 1/2**bits; the largest is adjusted so that they sum up."""
    whole: NDArray[np.int64] = np.floor(weights * 2**bits + 0.5).astype(np.int64)
    whole[whole.argmax(axis=0), np.arange(whole.shape[1])] += 2**bits - whole.sum(axis=0)
    return whole
