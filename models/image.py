"""Decodes JPEG, PNG and WebP (HEIC and AVIF with an extra) to the networks' uint8 input.

Serving, calibration and evaluation all call ``check_image`` and ``decode_images``, so they get the
same pixels; models.image_inputs calls them for a set's members. Limits are checked on the header,
before anything is allocated. ICC profiles are ignored and values taken as
sRGB, as in torchvision. For an animation it decodes the first picture (for APNG the default
picture, which every viewer shows).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from models import image_heif
from models.errors import CorruptImageError, TandemError
from models.image_alpha import lay_over_white
from models.image_header import WEBP_ALPHA_FLAG, ImageHeader, read_header
from models.image_limits import check_complete, check_first_end, check_full_pixels, check_limits
from models.image_png import default_picture
from models.image_resize import Axis, CropSource, Interpolation, common_region

Resize = Literal["crop", "stretch"]

# 50 Mi pixels: phones of 50 megapixels (8160 x 6144) pass. Memory: decision 0003.
DEFAULT_MAX_PIXELS = 50 * 2**20
# For files that cannot be decoded at reduced scale. A 5K screenshot (5120 x 2880) passes. The worst
# that passes, a 16-bit PNG with alpha, takes 0.6 s and 130 MB: decision 0003.
DEFAULT_MAX_FULL_PIXELS = 16 * 2**20
# A JPEG is decoded at 1/2, 1/4 or 1/8 if the result is at least this many times the resize target.
# Decision 0002 has the differences in pixels and the time saved.
_REDUCED_MARGIN = 2
_REDUCED_FLAGS = {
    2: cv2.IMREAD_REDUCED_COLOR_2,
    4: cv2.IMREAD_REDUCED_COLOR_4,
    8: cv2.IMREAD_REDUCED_COLOR_8,
}
# The BGR values that libjpeg fills in after a premature end: zeros of YCbCr, of CMYK and of YCCK. A
# picture may end in these. Searching each for a second start would cost 2 % (decision 0004).
_UNDECODED = [[level] * 3 for level in (128, 65, 64)]

# EXIF orientations whose stored rows, or stored columns, are reversed (5 to 8: also transposed).
_Y_MIRRORED, _X_MIRRORED = frozenset({3, 4, 6, 7}), frozenset({2, 3, 7, 8})

COLORS = 3  # blue, green, red


@dataclass(frozen=True)
class ImageRule:
    """Maps a picture to a network's input, as torchvision's classification presets do.

    The shorter side is resized to ``resize_shorter`` pixels (antialiased), then the central square
    of ``input_size`` pixels is cropped. With ``resize="stretch"`` the whole picture is resized to
    the square, whatever its aspect ratio, and ``resize_shorter`` equals ``input_size``.
    """

    input_size: int
    resize_shorter: int
    resize: Resize = "crop"
    interpolation: Interpolation = "bilinear"

    def __post_init__(self) -> None:
        if self.input_size < 1:
            raise ValueError(f"input_size is {self.input_size}; it must be at least 1")
        if self.resize_shorter < self.input_size:
            raise ValueError(
                f"resize_shorter {self.resize_shorter} is under input_size {self.input_size}: "
                "the centre crop would not fit"
            )
        if self.resize == "stretch" and self.resize_shorter != self.input_size:
            raise ValueError(
                f"resize stretch has no resize_shorter: let it be input_size {self.input_size}, "
                f"not {self.resize_shorter}"
            )

    @property
    def shape(self) -> tuple[int, int, int]:
        """The input's shape: rows, columns, colours."""
        return self.input_size, self.input_size, COLORS

    @property
    def num_bytes(self) -> int:
        """The input's size in bytes."""
        return self.input_size**2 * COLORS


class CheckedImage(NamedTuple):
    """A file whose header is within the limits; nothing was decoded yet."""

    header: ImageHeader
    reduction: int  # 1, 2, 4 or 8: the divisor of the decoded size

    @property
    def full_pixels(self) -> int:
        """The pixels that decoding makes, which decide its time and memory; twice for 16 bits."""
        width, height = self.header.width, self.header.height
        samples = 2 if self.header.bit_depth > 8 else 1
        return width * height * samples // self.reduction**2


def check_image(
    data: bytes | memoryview,
    rule: ImageRule,
    *,
    max_pixels: int = DEFAULT_MAX_PIXELS,
    max_full_pixels: int = DEFAULT_MAX_FULL_PIXELS,
) -> CheckedImage:
    """Read a file's header and check the limits, before anything is decoded or allocated.

    Raises:
        NotAnImageError: the bytes are no image.
        UnsupportedFormatError: an image, but not JPEG, PNG or WebP, or of a kind not decoded.
        TooManyPixelsError: more than ``max_pixels``, or more than ``max_full_pixels`` that cannot
            be decoded at reduced scale (PNG, WebP, a very narrow JPEG; 16-bit samples count twice).
        CorruptImageError: the file is truncated.

    """
    view = memoryview(data)
    header = read_header(view)
    check_limits(header, max_pixels)
    checked = CheckedImage(header, _choose_reduction(header, rule))
    check_full_pixels(header, checked.full_pixels, max_full_pixels)
    check_complete(view, header)
    return checked


def read_image(
    data: bytes | memoryview,
    rule: ImageRule,
    *,
    max_pixels: int = DEFAULT_MAX_PIXELS,
    max_full_pixels: int = DEFAULT_MAX_FULL_PIXELS,
) -> NDArray[np.uint8]:
    """Decode, turn upright, resize and crop one picture.

    Returns:
        (input_size, input_size, 3) uint8, BGR, 0 to 255. Transparency is laid over white; 16-bit
        samples keep their high byte.

    Raises:
        TandemError: as :func:`check_image`, CorruptImageError also for damaged pixels; else OpenCV
            could not get the memory it needs.

    """
    checked = check_image(data, rule, max_pixels=max_pixels, max_full_pixels=max_full_pixels)
    return decode_images(data, (rule,), checked).reshape(rule.shape)


def decode_images(
    data: bytes | memoryview, rules: Sequence[ImageRule], checked: CheckedImage
) -> NDArray[np.uint8]:
    """Decode a file once and make an input for each rule; see :func:`read_image`.

    ``checked`` must come from :func:`check_image` with the rule of the largest ``resize_shorter``.

    Returns:
        uint8 BGR, flat: the inputs one after another.

    """
    header, reduction = checked
    pixels = _decode(memoryview(data), header, reduction)  # (h, w) grey, or (..., 3 | 4) BGR[A]
    size = header.width, header.height
    crops = [_crop_axes(size, header.orientation, rule, reduction) for rule in rules]
    rows, columns = common_region(crops)
    source = CropSource(lay_over_white(pixels[rows, columns], header), rows.start, columns.start)
    flat = np.empty(sum([rule.num_bytes for rule in rules]), np.uint8)
    start = 0
    for rule, (y, x) in zip(rules, crops, strict=True):
        shape = rule.shape
        out = flat[start : start + math.prod(shape)].reshape(shape)
        if header.orientation == 1:
            source.resize(y, x, out)
        else:
            out[...] = _upright(source.resize(y, x), header.orientation)
        start += out.size
    return flat


def _choose_reduction(header: ImageHeader, rule: ImageRule) -> int:
    """Return the divisor of the decoded size, 1, 2, 4 or 8; 1 for formats other than JPEG."""
    if header.format != "jpeg":
        return 1
    shrink = min(header.width, header.height) / (rule.resize_shorter * _REDUCED_MARGIN)
    return 8 if shrink >= 8 else 4 if shrink >= 4 else 2 if shrink >= 2 else 1


def _decode(view: memoryview, header: ImageHeader, reduction: int) -> NDArray[np.uint8]:
    """Decode without turning: BGR, or the file's own channels if it has transparency."""
    flags = _REDUCED_FLAGS.get(reduction, cv2.IMREAD_COLOR) | cv2.IMREAD_IGNORE_ORIENTATION
    if header.has_alpha or header.transparent_gray is not None:
        flags = cv2.IMREAD_UNCHANGED
    pixels: NDArray[np.uint8] | None = None
    try:
        if header.format in image_heif.FORMATS:
            pixels = image_heif.decode(view, header.format)
        else:
            file = np.frombuffer(_without_the_rest(view, header), np.uint8)
            pixels = cv2.imdecode(file, flags)  # type: ignore[assignment]
    except cv2.error as error:
        if error.code == cv2.Error.StsNoMem:
            raise TandemError(f"No memory for {header.width} x {header.height} pixels.") from error
    expected = -(-header.height // reduction), -(-header.width // reduction)
    if pixels is None or pixels.shape[:2] != expected:
        raise CorruptImageError(
            f"The {header.format.upper()} announces {header.width} x {header.height} pixels, "
            "but they cannot be decoded: the file is damaged. Send it again, or save it anew."
        )
    if header.format == "jpeg" and pixels[-1, -1].tolist() in _UNDECODED:
        check_first_end(view, header)
    return pixels


def _without_the_rest(view: memoryview, header: ImageHeader) -> memoryview | bytes:
    """Return the file without the parts that OpenCV would read in another way than this module."""
    if header.format == "png":
        return default_picture(view)
    is_extended = header.format == "webp" and bytes(view[12:16]) == b"VP8X"
    if is_extended and header.has_alpha and not view[20] & WEBP_ALPHA_FLAG:
        flags = bytes([view[20] | WEBP_ALPHA_FLAG])  # else OpenCV drops the transparency
        return b"".join([view[:20], flags, view[21:]])
    return view


def _crop_axes(
    size: tuple[int, int], orientation: int, rule: ImageRule, reduction: int
) -> tuple[Axis, Axis]:
    """Return where the crop lies along the stored y and x; sizes and rounding are torchvision's."""
    width, height = size

    def axis(length: int, is_mirrored: bool) -> Axis:
        is_stretched = rule.resize == "stretch"
        short, cropped = min(size), rule.input_size
        resized = cropped if is_stretched else int(rule.resize_shorter * length / short)
        offset = round((resized - cropped) / 2)
        if is_mirrored:
            offset = resized - cropped - offset
        scale = length / resized / reduction
        return Axis(-(-length // reduction), scale, offset, cropped, rule.interpolation)

    return axis(height, orientation in _Y_MIRRORED), axis(width, orientation in _X_MIRRORED)


def _upright(square: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """Turn the crop as EXIF's orientation (1 to 8) asks: mirror the stored axes, then transpose."""
    square = square[::-1] if orientation in _Y_MIRRORED else square
    square = square[:, ::-1] if orientation in _X_MIRRORED else square
    return square.transpose(1, 0, 2) if orientation >= 5 else square
