"""Reads HEIC (libheif) and AVIF (libavif), if the extra ``heif`` is installed.

Both packages read a header without decoding, and the limits are checked in between. Orientation is
applied once: libheif applies irot, imir and clap while decoding, Pillow reports irot and imir for
an AVIF. Exif's orientation is ignored in both.
"""

import io
import struct
from typing import TYPE_CHECKING, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from models.errors import CorruptImageError, TandemError, UnsupportedFormatError
from models.extras import pip_install

if TYPE_CHECKING:
    from PIL.AvifImagePlugin import AvifImageFile
    from pillow_heif import HeifFile

FORMATS = ("heic", "avif")  # of an ImageHeader
EXTRA = "heif"
_MAX_PICTURES = 1000  # in a file; only the first, or the primary one, is decoded
_ORIENTATION_TAG = 0x0112
# Of a file's boxes and announced sizes; libheif allows 1,000 items, one for each tile.
_MAX_BOXES, _MAX_SIZES = 256, 4096
_ERRORS = (ValueError, RuntimeError, SyntaxError, EOFError, OSError, LookupError)


class HeifSize(NamedTuple):
    """A header's properties: the sides as decoded, and Exif's orientation."""

    width: int
    height: int
    orientation: int
    has_alpha: bool


def read_size(view: memoryview, name: str) -> HeifSize:
    """Read the header of a HEIC, HEIF or AVIF file, without decoding.

    Raises:
        UnsupportedFormatError: the extra is not installed, or there are too many pictures.
        CorruptImageError: the header is cut short or damaged.

    """
    try:
        import pillow_heif  # noqa: F401
    except ModuleNotFoundError as error:
        raise UnsupportedFormatError(
            f"{name} is not decoded: send JPEG, PNG or WebP, or install what decodes it where the "
            f"service runs: {pip_install(EXTRA)}."
        ) from error
    width, height = _largest_announced(view)
    if not width * height:
        raise CorruptImageError(
            f"The {name} header is cut short or damaged ({view.nbytes} bytes in all): "
            "send the whole file."
        )
    try:
        size, num_pictures = _avif_size(view) if name == "AVIF" else _heic_size(view)
    except _ERRORS:  # over the library's limit and ours; or decoding gives the reason
        size, num_pictures = HeifSize(width, height, 1, False), 1
    if num_pictures > _MAX_PICTURES:
        raise UnsupportedFormatError(
            f"{name} with {num_pictures:,} pictures is not decoded (up to {_MAX_PICTURES:,} are): "
            "send one of them, or JPEG, PNG or WebP."
        )
    if width * height > 4 * size.width * size.height:
        # A cut-out may be small, but decoding it needs the whole: the limits are for the whole.
        return size._replace(width=width, height=height)
    return size


def decode(view: memoryview, format: str) -> NDArray[np.uint8]:
    """Return the picture as stored: (h, w) grey, (h, w, 3) BGR or (h, w, 4) BGRA, 8 bits.

    Raises:
        CorruptImageError: the picture cannot be decoded.
        TandemError: there is not enough memory.

    """
    try:
        return _avif_pixels(view) if format == "avif" else _heic_pixels(view)
    except MemoryError as error:
        raise TandemError(f"No memory for the {format.upper()}'s pixels.") from error
    except _ERRORS as error:
        raise CorruptImageError(
            f"The {format.upper()} cannot be decoded ({' '.join(str(error).split())[:200]}): the "
            "file is damaged. Send it again, or save it anew."
        ) from error


def _heic(view: memoryview) -> "HeifFile":
    import pillow_heif

    options = pillow_heif.options
    options.DECODE_THREADS = 0  # pictures are decoded concurrently
    options.THUMBNAILS = options.DEPTH_IMAGES = options.AUX_IMAGES = False
    return pillow_heif.open_heif(bytes(view), bgr_mode=True)


def _heic_size(view: memoryview) -> tuple[HeifSize, int]:
    file = _heic(view)
    primary = file[file.primary_index]
    width, height = primary.size
    return HeifSize(width, height, 1, primary.has_alpha), len(file)


def _heic_pixels(view: memoryview) -> NDArray[np.uint8]:
    file = _heic(view)
    primary = file[file.primary_index]
    pixels = np.asarray(primary)
    if primary.premultiplied_alpha:
        return np.asarray(cv2.cvtColor(pixels, cv2.COLOR_mRGBA2RGBA), np.uint8)
    return pixels


def _avif(view: memoryview) -> "AvifImageFile":
    from PIL import AvifImagePlugin

    AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # pictures are decoded concurrently
    return AvifImagePlugin.AvifImageFile(io.BytesIO(view))


def _avif_size(view: memoryview) -> tuple[HeifSize, int]:
    with _avif(view) as file:
        width, height = file.size
        orientation = file.getexif().get(_ORIENTATION_TAG, 1)
        return HeifSize(width, height, orientation, "A" in file.mode), file.n_frames


def _avif_pixels(view: memoryview) -> NDArray[np.uint8]:
    with _avif(view) as file:
        is_opaque = "A" not in file.mode
        mode, code = ("RGB", cv2.COLOR_RGB2BGR) if is_opaque else ("RGBA", cv2.COLOR_RGBA2BGRA)
        return np.asarray(cv2.cvtColor(np.asarray(file.convert(mode)), code), np.uint8)


def _largest_announced(view: memoryview) -> tuple[int, int]:
    """Return the largest size in the ``ispe`` boxes of ``meta`` (ISO/IEC 23008-12, 6.5.3).

    (0, 0) if there are none, or too many to read.
    """
    sizes, position = [(0, 0)], 0
    for _ in range(_MAX_BOXES):
        if position + 16 > view.nbytes:
            break
        length, kind = struct.unpack_from(">I4s", view, position)
        if length == 1:  # a 64-bit length follows
            (length,) = struct.unpack_from(">Q", view, position + 8)
        end = position + length if length else view.nbytes
        if kind == b"meta":
            bodies = bytes(view[position:end]).split(b"ispe\0\0\0\0", _MAX_SIZES)[1:]
            if len(bodies) == _MAX_SIZES:
                return 0, 0
            sizes += [struct.unpack_from(">II", body) for body in bodies if len(body) >= 8]
        position = max(end, position + 8)
    return max(sizes, key=lambda size: size[0] * size[1])
