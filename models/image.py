"""Decodes JPEG, PNG and WebP (HEIC and AVIF with an extra) to the networks' uint8 input.

Serving, calibration and evaluation all call ``check_image`` and ``decode_images``, so they get the
same pixels. Limits are checked on the header, before anything is allocated. ICC profiles are
ignored and values taken as sRGB, as in torchvision, unless they are to be converted
(:mod:`models.image_colors`). Of an animation the first picture is decoded (of an APNG the default
picture, which every viewer shows). Transparent images are laid over white, and 16-bit samples are
reduced to 8 bits.

A picture is decoded once for all members; each distinct input is made once. If all inputs are
equal, an image is uint8 (H, W, 3) and a batch (N, H, W, 3). Otherwise an image is uint8 (B,), the
distinct inputs one after another, and a batch is (N, B). Both are stacked and sliced alike.
:meth:`ImageInputs.of` returns a member's part.
"""

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, Self

import cv2
import numpy as np
from numpy.typing import NDArray

from models.errors import CorruptImageError, TandemError
from models.image_colors import IccProfiles, check_can_convert, lay_over_white, to_srgb
from models.image_files import HEIF_FORMATS, decode_heif, default_picture
from models.image_geometry import Axis, CropSource, Interpolation, PictureRegion, common_region
from models.image_header import (
    WEBP_ALPHA_FLAG,
    ImageHeader,
    check_complete,
    check_first_end,
    check_full_pixels,
    check_limits,
    read_header,
)

Resize = Literal["crop", "stretch", "squash", "letterbox", "smart_resize"]
Size = int | tuple[int, int]  # px: the side of a square, or height and width
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
SCALED, BORDERED = ("crop", "squash"), ("crop", "letterbox")  # rules
COLORS = 3  # blue, green, red


@dataclass(frozen=True)
class ImageRule:
    """Maps a picture to a network's input, by one of these rules; all resize antialiased.

    - ``crop``: the shorter side is resized to ``resize_shorter`` pixels, then the middle, of
      ``input_size``, is cropped; a rectangle longer than the resized picture gets borders
      (torchvision's ``Resize(s)`` and ``CenterCrop``).
    - ``squash``: the whole picture is resized to ``input_size`` times a factor that makes its
      shorter side ``resize_shorter``, then cropped (``Resize((s, s))`` and ``CenterCrop``).
    - ``stretch``: the whole picture is resized to ``input_size`` (``Resize((h, w))``).
    - ``letterbox``: the whole picture is resized to fit within, and gets borders (YOLO's).
    - ``smart_resize``: the largest middle part with the input's aspect ratio is resized (Keras').

    The last three have the input's longer side as ``resize_shorter``. Borders have the level
    ``fill``.
    """

    input_size: Size
    resize_shorter: int
    resize: Resize = "crop"
    interpolation: Interpolation = "bilinear"
    fill: int = 0

    def __post_init__(self) -> None:
        short, long = sorted(self.shape[:2])
        if short < 1:
            raise ValueError(f"input_size is {self.input_size}; it must be at least 1")
        if self.resize_shorter < short:
            raise ValueError(
                f"resize_shorter {self.resize_shorter} is under input_size {self.input_size}: "
                "the centre crop would not fit"
            )
        if self.resize not in SCALED and self.resize_shorter != long:
            raise ValueError(
                f"resize {self.resize} has no resize_shorter: let it be input_size {long}, "
                f"not {self.resize_shorter}"
            )
        if self.fill and self.resize not in BORDERED:
            raise ValueError(f"resize {self.resize} makes no borders: leave out fill {self.fill}")

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        """The input's shape: rows, columns, colours."""
        return *sides_of(self.input_size), COLORS

    @cached_property
    def needed_shorter(self) -> int:
        """The shorter side in px that is enough of a picture, before it is resized."""
        short, long = sorted(self.shape[:2])
        return (
            -(-self.resize_shorter * long // short)
            if self.resize == "squash"
            else (self.resize_shorter)
        )

    @cached_property
    def num_bytes(self) -> int:
        """The input's size in bytes."""
        return math.prod(self.shape)


def sides_of(size: Size) -> tuple[int, int]:
    """Return height and width."""
    return (size, size) if isinstance(size, int) else size


def size_of(height: int, width: int) -> Size:
    """Return a size as it is written: one number for a square."""
    return height if height == width else (height, width)


def size_text(size: Size) -> str:
    """Return a size for people: 224, or 64x128 (height x width)."""
    return "x".join(map(str, dict.fromkeys(sides_of(size))))


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
    of_regions: bool = False,
) -> CheckedImage:
    """Read a file's header and check the limits, before anything is decoded or allocated.

    ``of_regions``: the picture is decoded at full scale, for :func:`decode_regions`.

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
    reduction = 1
    if header.format == "jpeg" and not of_regions:
        shrink = min(header.width, header.height) / (rule.needed_shorter * _REDUCED_MARGIN)
        reduction = 8 if shrink >= 8 else 4 if shrink >= 4 else 2 if shrink >= 2 else 1
    checked = CheckedImage(header, reduction)
    check_full_pixels(header, checked.full_pixels, max_full_pixels, of_regions=of_regions)
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
        uint8 of the rule's shape, (H, W, 3), BGR, 0 to 255. Transparency is laid over white; 16-bit
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
    """Decode a file once; return each rule's input, uint8 BGR, flat, one after another.

    ``checked`` must come from :func:`check_image` with the rule of the largest ``needed_shorter``.
    The pixels and errors are those of :func:`read_image`.
    """
    return _resized(_decode(memoryview(data), *checked), rules, checked)


def decode_regions(
    data: bytes | memoryview,
    rules: Sequence[ImageRule],
    checked: CheckedImage,
    regions: Sequence[PictureRegion],
) -> list[NDArray[np.uint8] | TandemError]:
    """Decode a file once; return of each region what :func:`decode_images` makes of its pixels.

    ``checked`` must be of a file ``of_regions``. A region that is not within the picture has its
    error in its place.
    """
    header, _ = checked
    upright = _upright(_decode(memoryview(data), *checked), header.orientation)  # a view
    height, width = upright.shape[:2]
    parts: list[NDArray[np.uint8] | TandemError] = []
    for region in regions:
        try:
            left, top, right, bottom = region.within(width, height)
        except TandemError as error:
            parts.append(error)
            continue
        part = upright[top:bottom, left:right]
        if header.orientation != 1:
            part = np.ascontiguousarray(part)
        own = header._replace(width=right - left, height=bottom - top, orientation=1)
        parts.append(_resized(part, rules, CheckedImage(own, 1)))
    return parts


def _resized(
    pixels: NDArray[np.uint8], rules: Sequence[ImageRule], checked: CheckedImage
) -> NDArray[np.uint8]:
    """Return the inputs of decoded pixels, (h, w) grey or (..., 3 | 4) BGR[A], flat."""
    header, reduction = checked
    size = header.width, header.height
    crops = [_crop_axes(size, header.orientation, rule, reduction) for rule in rules]
    rows, columns = common_region(crops)
    source = CropSource(lay_over_white(pixels[rows, columns], header), rows.start, columns.start)
    flat = np.empty(sum([rule.num_bytes for rule in rules]), np.uint8)
    start = 0
    for rule, (y, x) in zip(rules, crops, strict=True):
        shape = rule.shape
        out = flat[start : start + rule.num_bytes].reshape(shape)
        if header.orientation == 1 and (y.size, x.size) == shape[:2]:
            source.resize(y, x, out)
        else:
            _place(_upright(source.resize(y, x), header.orientation), rule.fill, out)
        start += out.size
    return flat


def _decode(view: memoryview, header: ImageHeader, reduction: int) -> NDArray[np.uint8]:
    """Decode without turning: BGR, or the file's own channels if it has transparency."""
    flags = _REDUCED_FLAGS.get(reduction, cv2.IMREAD_COLOR) | cv2.IMREAD_IGNORE_ORIENTATION
    if header.has_alpha or header.transparent_gray is not None:
        flags = cv2.IMREAD_UNCHANGED
    pixels: NDArray[np.uint8] | None = None
    try:
        if header.format in HEIF_FORMATS:
            pixels = decode_heif(view, header.format)
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
    """Return where the crop lies along the stored y and x.

    Sizes and rounding are those of torchvision, of YOLO's letterbox and of Keras' smart_resize.
    """
    width, height = size
    rows, columns, _ = rule.shape
    if orientation >= 5:
        rows, columns = columns, rows

    def axis(lengths: tuple[int, int], sides: tuple[int, int], is_mirrored: bool) -> Axis:
        (length, other), (side, other_side) = lengths, sides
        resized, part = side, length  # the middle part of the picture that is resized
        if rule.resize == "crop":
            resized = int(rule.resize_shorter * length / min(size))
        elif rule.resize == "squash":
            resized = int(rule.resize_shorter * side / min(sides))
        elif rule.resize == "letterbox":
            resized = max(1, round(length * min(side / length, other_side / other)))
        elif rule.resize == "smart_resize":
            part = max(1, min(length, int(other * side / other_side)))
        cropped = min(side, resized)  # a longer side gets borders
        start, offset = (length - part) // 2, round((resized - cropped) / 2)
        if is_mirrored:
            start, offset = length - part - start, resized - cropped - offset
        ends = start // reduction, -(-(start + part) // reduction)
        scale = part / resized / reduction
        place = offset + start / reduction / scale
        return Axis(-(-length // reduction), scale, place, cropped, rule.interpolation, ends)

    y = axis((height, width), (rows, columns), orientation in _Y_MIRRORED)
    return y, axis((width, height), (columns, rows), orientation in _X_MIRRORED)


def _upright(crop: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """Turn the crop as EXIF's orientation (1 to 8) asks: mirror the stored axes, then transpose."""
    crop = crop[::-1] if orientation in _Y_MIRRORED else crop
    crop = crop[:, ::-1] if orientation in _X_MIRRORED else crop
    return crop.swapaxes(0, 1) if orientation >= 5 else crop


def _place(crop: NDArray[np.uint8], fill: int, out: NDArray[np.uint8]) -> None:
    """Copy a crop into the middle of ``out``, with borders of level ``fill`` if it is smaller."""
    (rows, columns), (height, width) = crop.shape[:2], out.shape[:2]
    top, left = (height - rows) // 2, (width - columns) // 2
    if crop.shape != out.shape:
        out[...] = fill
    out[top : top + rows, left : left + columns] = crop


Pixels = NDArray[np.uint8]


class ImageInputs:
    """Makes the inputs of a set's members from a picture, by each member's image rule."""

    def __init__(self, rules: Mapping[str, ImageRule]) -> None:
        self.rules = tuple(dict.fromkeys(rules.values()))  # distinct
        # A reduced scale that suits the largest suits all.
        self._largest = max(self.rules, key=lambda rule: rule.needed_shorter)
        ends = np.cumsum([rule.num_bytes for rule in self.rules]).tolist()
        self.num_bytes: int = ends[-1]  # per image
        self._icc_profiles: IccProfiles = "ignore"
        self._parts = {
            name: (ends[place := self.rules.index(rule)] - rule.num_bytes, ends[place], rule)
            for name, rule in rules.items()
        }

    def with_profiles(self, icc_profiles: IccProfiles) -> Self:
        """Return inputs that ignore pictures' ICC profiles, or convert them to sRGB.

        Raises :class:`MissingExtraError` if the latter is asked for without Pillow.
        """
        check_can_convert(icc_profiles)
        made = copy(self)
        made._icc_profiles = icc_profiles
        return made

    def check(
        self,
        data: bytes | memoryview,
        *,
        max_pixels: int = DEFAULT_MAX_PIXELS,
        max_full_pixels: int = DEFAULT_MAX_FULL_PIXELS,
        of_regions: bool = False,
    ) -> CheckedImage:
        """Read a file's header and check the limits; see :func:`models.image.check_image`."""
        return check_image(
            data,
            self._largest,
            max_pixels=max_pixels,
            max_full_pixels=max_full_pixels,
            of_regions=of_regions,
        )

    def decode(self, data: bytes | memoryview, checked: CheckedImage) -> Pixels:
        """Decode a checked file to uint8 BGR, (H, W, 3), or (B,) if the members' inputs differ.

        Raises:
            CorruptImageError: the file is damaged.
            TandemError: OpenCV could not get the memory it needs.
        """
        return self._shaped(decode_images(data, self.rules, checked), data, checked)

    def decode_regions(
        self, data: bytes | memoryview, checked: CheckedImage, regions: Sequence[PictureRegion]
    ) -> list[Pixels | TandemError]:
        """Decode a checked file once, to an image or an error for each of its regions.

        Raises as :meth:`decode` does, for the file as a whole.
        """
        parts = decode_regions(data, self.rules, checked, regions)
        return [
            part if isinstance(part, TandemError) else self._shaped(part, data, checked)
            for part in parts
        ]

    def _shaped(self, flat: Pixels, data: bytes | memoryview, checked: CheckedImage) -> Pixels:
        if self._icc_profiles == "convert":
            to_srgb(flat, memoryview(data), checked.header)
        return flat if len(self.rules) > 1 else flat.reshape(self.rules[0].shape)

    def read(self, data: bytes | memoryview) -> Pixels:
        """Check a file with the usual limits and decode it; see :func:`models.image.read_image`."""
        return self.decode(data, self.check(data))

    def views(self, images: Pixels) -> Pixels:
        """Return decoded images as the networks get them; a set's own function may change them."""
        return images

    def first_view(self, data: bytes | memoryview) -> Pixels:
        """Read a file as the networks get it, in the first of its views."""
        images = self.views(self.read(data)[None])
        first: Pixels = images[0] if images.ndim in (2, 4) else images[0, 0]
        return first

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
        return _shaped(images[..., first:end], rule)

    def split(self, images: Pixels) -> list[Pixels]:
        """Return a batch's distinct inputs, each (N, H, W, 3), in the order of ``rules``."""
        if images.ndim > 3:
            return [images]
        return [
            _shaped(images[..., first:end], rule)
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


def _shaped(images: Pixels, rule: ImageRule) -> Pixels:
    return images.reshape(*images.shape[:-1], *rule.shape)
