"""Composites transparent images over white, and reduces 16-bit samples to 8 bits."""

import cv2
import numpy as np
from numpy.typing import NDArray

from models.image_header import ImageHeader

Samples = NDArray[np.uint8] | NDArray[np.uint16]

_BAND_ROWS = 256  # rows composited at a time, which bounds the larger intermediates


def lay_over_white(region: Samples, header: ImageHeader) -> NDArray[np.uint8]:
    """Composite OpenCV's decoded pixels to opaque BGR.

    (rows, columns) grey, (..., 3) BGR or (..., 4) BGRA, uint8 or uint16 -> (..., 3) uint8 BGR. It
    equals a browser's view on a white page: c * alpha + 255 * (1 - alpha). Opaque uint8 is returned
    unchanged.
    """
    if region.ndim == 3 and region.shape[2] == 3 and region.dtype == np.uint8:
        return region  # type: ignore[return-value]
    opaque = np.empty((*region.shape[:2], 3), np.uint8)
    for top in range(0, len(region), _BAND_ROWS):
        rows = slice(top, top + _BAND_ROWS)
        opaque[rows] = _band_over_white(region[rows], header)
    return opaque


def _band_over_white(band: Samples, header: ImageHeader) -> NDArray[np.uint8]:
    samples = band if band.dtype == np.uint8 else (band >> 8).astype(np.uint8)
    if band.ndim == 2:
        samples = np.where(band == _gray_level(header), np.uint8(255), samples)
        return np.asarray(cv2.cvtColor(samples, cv2.COLOR_GRAY2BGR), np.uint8)
    if band.shape[2] == 3:
        return samples  # type: ignore[return-value]
    alpha = samples[..., 3:].astype(np.uint16)  # (rows, columns, 1)
    darkness = (255 - samples[..., :3]) * alpha  # (rows, columns, 3), at most 255 * 255
    return (255 - (darkness + 127) // 255).astype(np.uint8)


def _gray_level(header: ImageHeader) -> int:
    """Return the transparent grey level after decoding, which scales fewer bits to 0..255."""
    if header.transparent_gray is None:
        return -1
    largest: int = 2**header.bit_depth - 1
    level = header.transparent_gray & largest
    return level if header.bit_depth >= 8 else level * 255 // largest
