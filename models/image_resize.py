"""Antialiased resize of a crop, with the results of Pillow's BILINEAR and BICUBIC filters.

A pixel of the result is a weighted mean of source pixels under a triangle, two source-to-result
scales wide (one pixel each side when enlarging): Pillow's ``ImagingResample``, and so torchvision's
classification preprocessing. The axes are done one after the other, on the crop alone, in 16-bit
integers: weights are in 1/256 and add up to 256, so a sum is at most 255 * 256 + 128 < 2**16.

The bicubic kernel (a = -0.5, twice as wide) has negative weights: it takes 32-bit integers, weights
in 1/2**14, and its sums are cut to 0..255.

Resizing along an axis is a sparse matrix (size, source rows) times the rows: SciPy adds a multiple
of one row to another in one go, where NumPy makes a copy of each row first (DECISIONS.md).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from scipy.sparse import csr_array

# Weights of 8 bits are too coarse for many of them: a larger shrink starts with a mean over
# whole blocks, which leaves a factor of 4 to 8 for the triangle (measured: DECISIONS.md).
_MAX_TRIANGLE_SHRINK = 8
_CACHED_AXES = 1024  # about 10 KB each
_BITS = {"bilinear": 8, "bicubic": 14}  # of a weight
_TYPES = {"bilinear": np.uint16, "bicubic": np.int32}

Pixels = NDArray[np.uint8]
Wide = NDArray[Any]  # pixels in the type of the weights: uint16, or int32
Interpolation = Literal["bilinear", "bicubic"]


class Axis(NamedTuple):
    """Where the crop lies along one axis of the source.

    The whole source (``length`` pixels) would become ``length / scale`` pixels; the crop is
    ``size`` of these, from ``offset`` on.
    """

    length: int
    scale: float
    offset: int
    size: int
    interpolation: Interpolation = "bilinear"


@dataclass(frozen=True)
class _Taps:
    """Rows ``first:stop`` of the source, and how each output row is made of them."""

    first: int
    stop: int
    block: int  # rows to average first
    weights: "csr_array[Any]"  # (size, blocks), uint16 or int32; a row adds up to 2**bits
    bits: int


class CropSource:
    """What crops of one picture are made of, (rows, columns, 3) uint8, widened once for all.

    Args:
        region: the source's :func:`common_region`, opaque; the order of the colours is kept.
        first_row: the region's first row in the source.
        first_column: and column.

    """

    def __init__(self, region: Pixels, first_row: int, first_column: int) -> None:
        self._region, self._first_row, self._first_column = region, first_row, first_column
        self._widened: dict[np.dtype[Any], Wide] = {}

    def resize(self, y: Axis, x: Axis, out: Pixels | None = None) -> Pixels:
        """Return a crop, (y.size, x.size, 3) uint8; ``out``: where it goes, contiguous."""
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
        if y.interpolation == "bicubic":  # in Pillow's order, which shows: sums are cut to 0..255
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
    """Return the source's rows and columns that crops, each of y and x, are made of together."""
    taps = [(_taps(y), _taps(x)) for y, x in crops]
    rows = slice(min(y.first for y, _ in taps), max(y.stop for y, _ in taps))
    return rows, slice(min(x.first for _, x in taps), max(x.stop for _, x in taps))


def _block_means(region: Pixels, rows: int, columns: int) -> Pixels:
    """Average blocks of ``rows`` x ``columns`` pixels; those at the end may have fewer."""
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
    """Exchange rows and columns; in memory too, which OpenCV does faster than NumPy."""
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
    centre = (np.arange(axis.offset, axis.offset + axis.size) + 0.5) * scale  # (size,)
    low = np.maximum((centre - reach + 0.5).astype(np.intp), 0)
    high = np.minimum((centre + reach + 0.5).astype(np.intp), length)
    first, stop = int(low[0]), int(high[-1])
    rows = low + np.arange(int((high - low).max()))[:, None]  # (taps, size)
    last = axis.length / block - (length - 1)  # the last block's pixels, as a part of a whole one
    part = np.where(rows == length - 1, last, 1.0)
    weights = _kernel(np.abs(rows + (part / 2 - centre)) / stretch, kind) * part * (rows < high)
    whole = _as_integers(weights / weights.sum(axis=0), _BITS[kind]).astype(_TYPES[kind])
    return _Taps(first * block, stop * block, block, _matrix(rows - first, whole), _BITS[kind])


def _matrix(columns: NDArray[np.intp], weights: NDArray[Any]) -> "csr_array[Any]":
    """Return the matrix with these weights in these columns of each row, both (taps, size)."""
    from scipy.sparse import csr_array  # here: 8 MB and 0.06 s, for those alone who read images

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
    """Round weights (taps, size) to 1/2**bits; the largest takes what they lack to add up."""
    whole: NDArray[np.int64] = np.floor(weights * 2**bits + 0.5).astype(np.int64)
    whole[whole.argmax(axis=0), np.arange(whole.shape[1])] += 2**bits - whole.sum(axis=0)
    return whole
