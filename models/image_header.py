"""Reads an image's format and size from its header, without decoding pixels.

Three small parsers, by the specifications: JPEG (ITU-T T.81 annex B), PNG (W3C, third edition) and
WebP (RFC 9649). They walk segments, never compressed data, and copy nothing of the body.
"""

import re
import struct
from collections.abc import Iterator
from typing import NamedTuple

from models.errors import CorruptImageError, NotAnImageError, UnsupportedFormatError
from models.image_formats import DECODED, name_format

# More segments than this before the pixels is an attack on the parser, not metadata: an ICC
# profile takes at most 255, and extended XMP a few hundred.
_MAX_SEGMENTS = 4096
# Any marker that begins a segment or ends the image: not restarts, nor other bare markers.
_JPEG_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")
_JPEG_MARKERS = frozenset(range(256)) - {0x00, 0x01, *range(0xD0, 0xD9), 0xFF}
_JPEG_FRAMES = frozenset({0xC0, 0xC1, 0xC2, 0xC9, 0xCA})  # baseline, extended, progressive
_JPEG_OTHER_FRAMES = frozenset({*range(0xC3, 0xD0), 0xF7}) - _JPEG_FRAMES - {0xC4, 0xC8, 0xCC}
_PROGRESSIVE = frozenset({0xC2, 0xCA})
_PNG_START = b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR"
_EXIF = b"Exif\0\0"
_ORIENTATION_TAG = 0x0112


class ImageHeader(NamedTuple):
    """What the file announces.

    ``format`` is "jpeg", "png" or "webp". ``width`` and ``height`` are as stored; ``orientation``
    (EXIF, 1 to 8) tells how they are to be turned for display. ``transparent_gray`` is the one grey
    level that a greyscale PNG declares transparent, on the file's own scale of ``bit_depth`` bits.
    ``data_offset`` is where compressed data begins; ``has_many_scans`` is true of a JPEG that is
    progressive or keeps its components in separate scans.
    """

    format: str
    width: int
    height: int
    orientation: int = 1
    has_alpha: bool = False
    bit_depth: int = 8
    transparent_gray: int | None = None
    data_offset: int = 0
    has_many_scans: bool = False


def read_header(data: bytes | memoryview) -> ImageHeader:
    """Parse the header of a JPEG, PNG or WebP file.

    Raises:
        NotAnImageError: an empty body, or bytes of no image format known here.
        UnsupportedFormatError: an image of a format (or a JPEG process) that is not decoded.
        CorruptImageError: the header is cut short, contradicts itself or announces 0 pixels.

    """
    view = memoryview(data)
    if not view.nbytes:
        raise NotAnImageError("The body is empty (0 bytes): send a JPEG, PNG or WebP image.")
    name = name_format(view)
    if name is None:
        raise NotAnImageError(
            f"The {view.nbytes} bytes are no image (they begin {bytes(view[:8])!r}): "
            "send a JPEG, PNG or WebP image."
        )
    if name not in DECODED:
        raise UnsupportedFormatError(f"{name} is not decoded: send JPEG, PNG or WebP.")
    try:
        header = _PARSERS[name](view)
    except (struct.error, IndexError):
        header = None
    if header is None:
        raise CorruptImageError(
            f"The {name.upper()} header is cut short or damaged ({view.nbytes} bytes in all): "
            "send the whole file."
        )
    if header.width == 0 or header.height == 0:
        raise CorruptImageError(
            f"The {name.upper()} header announces {header.width} x {header.height} pixels; "
            "both sides must be at least 1: send another picture."
        )
    return header


def jpeg_segments(view: memoryview, position: int = 2) -> Iterator[tuple[int, int, int]]:
    """Yield (marker, start, end) of each segment's body up to the end of the image or of the bytes.

    Compressed data and whatever else stands between segments is skipped, as libjpeg does.
    """
    num_bytes = view.nbytes
    for _ in range(_MAX_SEGMENTS):
        # Nearly always one begins where the last has ended.
        if (
            position + 2 <= num_bytes
            and view[position] == 0xFF
            and view[position + 1] in _JPEG_MARKERS
        ):
            start = position + 2
        elif (found := _JPEG_MARKER.search(view, position)) is not None:
            start = found.end()
        else:
            return
        if start + 2 > num_bytes:
            return
        position = start + (view[start] << 8 | view[start + 1])
        yield view[start - 1], start + 2, position
    raise CorruptImageError(f"The JPEG has more than {_MAX_SEGMENTS} segments: save it anew.")


def _read_jpeg(view: memoryview) -> ImageHeader | None:
    frame: tuple[int, int, int, bool] | None = None
    orientation = 1
    for marker, start, end in jpeg_segments(view):
        if marker == 0xE1 and bytes(view[start : start + 6]) == _EXIF:
            orientation = read_orientation(view[start + 6 : end])
        elif marker in _JPEG_FRAMES:
            precision, height, width, components = struct.unpack_from(">BHHB", view, start)
            if precision != 8:
                raise UnsupportedFormatError(
                    f"JPEG with {precision} bits per sample is not decoded (8 are): "
                    "send JPEG, PNG or WebP."
                )
            frame = width, height, components, marker in _PROGRESSIVE
        elif marker in _JPEG_OTHER_FRAMES:
            raise UnsupportedFormatError(
                f"Lossless or hierarchical JPEG (marker FF{marker:02X}) is not decoded: "
                "send baseline or progressive JPEG, PNG or WebP."
            )
        elif marker == 0xDA and frame is not None:
            width, height, components, is_progressive = frame
            many = is_progressive or view[start] < components
            return ImageHeader(
                "jpeg", width, height, orientation, data_offset=start, has_many_scans=many
            )
        elif marker in (0xD9, 0xDA):
            return None
    return None


def _read_png(view: memoryview) -> ImageHeader | None:
    if bytes(view[:16]) != _PNG_START:
        return None
    width, height, bit_depth, colour_type = struct.unpack_from(">IIBB", view, 16)
    has_alpha, orientation, transparent_gray, position = colour_type in (4, 6), 1, None, 8
    for _ in range(_MAX_SEGMENTS):
        (length,) = struct.unpack_from(">I", view, position)
        kind, start = bytes(view[position + 4 : position + 8]), position + 8
        if kind == b"tRNS" and colour_type == 0:
            (transparent_gray,) = struct.unpack_from(">H", view, start)
        elif kind == b"tRNS":
            has_alpha = True
        elif kind == b"eXIf":
            orientation = read_orientation(view[start : start + length])
        elif kind == b"IDAT":
            return ImageHeader(
                "png", width, height, orientation, has_alpha, bit_depth, transparent_gray, start
            )
        position = start + length + 4  # the checksum
    return None


def _read_webp(view: memoryview) -> ImageHeader | None:
    kind, start = bytes(view[12:16]), 20
    if kind == b"VP8 ":
        if bytes(view[start + 3 : start + 6]) != b"\x9d\x01\x2a":
            return None
        width, height = struct.unpack_from("<HH", view, start + 6)
        return ImageHeader("webp", width & 0x3FFF, height & 0x3FFF, data_offset=start)
    if kind == b"VP8L":
        signature, bits = struct.unpack_from("<BI", view, start)
        width, height, has_alpha = bits & 0x3FFF, bits >> 14 & 0x3FFF, bool(bits >> 28 & 1)
        if signature != 0x2F:
            return None
        return ImageHeader("webp", width + 1, height + 1, has_alpha=has_alpha, data_offset=start)
    if kind != b"VP8X":
        return None
    flags, width, height = view[start], view[start + 4 : start + 7], view[start + 7 : start + 10]
    return ImageHeader(
        "webp",
        int.from_bytes(width, "little") + 1,
        int.from_bytes(height, "little") + 1,
        _webp_orientation(view) if flags & 0x08 else 1,
        has_alpha=bool(flags & 0x10),
        data_offset=start + 10,
    )


def _webp_orientation(view: memoryview) -> int:
    position = 12
    for _ in range(_MAX_SEGMENTS):
        if position + 8 > view.nbytes:
            return 1
        (length,) = struct.unpack_from("<I", view, position + 4)
        if bytes(view[position : position + 4]) == b"EXIF":
            exif = view[position + 8 : position + 8 + length]
            return read_orientation(exif[6:] if bytes(exif[:6]) == _EXIF else exif)
        position += 8 + length + length % 2
    return 1


def read_orientation(exif: memoryview) -> int:
    """Return the orientation (1 to 8) of EXIF's first directory; 1 if absent or damaged."""
    order = {b"II": "<", b"MM": ">"}.get(bytes(exif[:2]))
    if order is None:
        return 1
    try:
        (directory,) = struct.unpack_from(order + "I", exif, 4)
        (num_entries,) = struct.unpack_from(order + "H", exif, directory)
        for entry in range(directory + 2, directory + 2 + 12 * num_entries, 12):
            tag, _, _, value = struct.unpack_from(order + "HHIH", exif, entry)
            if tag == _ORIENTATION_TAG:
                return value if 1 <= value <= 8 else 1
    except struct.error:
        pass
    return 1


_PARSERS = {"jpeg": _read_jpeg, "png": _read_png, "webp": _read_webp}
