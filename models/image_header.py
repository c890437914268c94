"""Reads an image's format and size from its header, and refuses files by header and end.

Nothing is decoded or allocated before. There are three small parsers by the specifications: JPEG
(ITU-T T.81 annex B), PNG (W3C, third edition) and WebP (RFC 9649). They walk segments, skip
compressed data, and copy nothing of the body. The orientation is of their Exif metadata (CIPA
DC-008). :mod:`models.image_files` reads HEIC and AVIF.
"""

import re
import struct
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from models.errors import (
    CorruptImageError,
    NotAnImageError,
    TooManyPixelsError,
    UnsupportedFormatError,
)
from models.image_files import (
    DECODED,
    HEIF_FORMATS,
    KINDS,
    OF_THE_EXTRA,
    ORIENTATION_TAG,
    PNG_SIGNATURE,
    has_png_end,
    name_format,
    name_wrapping,
    png_chunks,
    read_size,
)

# More segments before the pixels are an attack on the parser: an ICC profile takes at most 255, and
# extended XMP a few hundred.
_MAX_SEGMENTS = 4096
# Any marker that starts a segment or ends the image, without restarts and other bare markers.
_JPEG_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")
_JPEG_MARKERS = frozenset(range(256)) - {0x00, 0x01, *range(0xD0, 0xD9), 0xFF}
_JPEG_FRAMES = frozenset({0xC0, 0xC1, 0xC2, 0xC9, 0xCA})  # baseline, extended, progressive
_JPEG_OTHER_FRAMES = frozenset({*range(0xC3, 0xD0), 0xF7}) - _JPEG_FRAMES - {0xC4, 0xC8, 0xCC}
_PROGRESSIVE = frozenset({0xC2, 0xCA})
_JPEG_COMPONENTS = frozenset({1, 3, 4})  # grey, YCbCr or RGB, CMYK or YCCK
_PNG_START = PNG_SIGNATURE + b"\0\0\0\x0dIHDR"
WEBP_ALPHA_FLAG = 0x10  # of VP8X's flags, at byte 20 of the file
_PNG_CRITICAL = frozenset({b"IHDR", b"PLTE", b"IDAT", b"IEND"})
_EXIF_START = b"Exif\0\0"  # before the TIFF header: always in JPEG, by mistake in PNG and WebP
# OpenCV's own limit on either side (CV_IO_MAX_IMAGE_WIDTH, CV_IO_MAX_IMAGE_HEIGHT).
_MAX_SIDE = 2**20
# Each scan passes over the whole picture; encoders write about 10, an attack thousands.
_MAX_SCANS = 100
# In compressed data FF is followed by 00 or a restart marker, so it contains neither of these.
_JPEG_END = re.compile(rb"\xff\xd9")
_JPEG_START_OR_END = re.compile(rb"\xff[\xd8\xd9]")
_LONG = 4  # the type of 4-byte values; the tag should have SHORT, of 2 bytes


class ImageHeader(NamedTuple):
    """The properties in a file's header."""

    format: str  # "jpeg", "png", "webp", "heic" or "avif"
    width: int  # in pixels, as stored
    height: int
    orientation: int = 1  # EXIF's, 1 to 8, for display
    has_alpha: bool = False
    bit_depth: int = 8
    transparent_gray: int | None = None  # a grey PNG's transparent level, in bit_depth bits
    data_offset: int = 0  # where compressed data begins
    has_many_scans: bool = False  # a JPEG is progressive, or has a scan for each component


def read_header(data: bytes | memoryview) -> ImageHeader:
    """Parse the header of a JPEG, PNG or WebP file, or with the extra of a HEIC or AVIF file.

    Raises:
        NotAnImageError: an empty body, or bytes of no known image format.
        UnsupportedFormatError: an image of a format (or a JPEG process) that is not decoded.
        CorruptImageError: the header is cut short, contradicts itself or announces 0 pixels.
    """
    view = memoryview(data)
    if not view.nbytes:
        raise NotAnImageError(f"The body is empty (0 bytes): send a {KINDS} image.")
    name = name_format(view)
    if name is None:  # its beginning as text, or in hex
        begin = bytes(view[:8])
        words = " ".join(begin.decode("latin-1").split())
        shown = f'"{words}"' if begin.isascii() and words.isprintable() else begin.hex(" ")
        if (wrapping := name_wrapping(view)) is not None:
            what, remedy = wrapping
            raise NotAnImageError(f"The {view.nbytes} bytes are {what}, not an image: {remedy}.")
        problem = f"The {view.nbytes} bytes are no image (they begin {shown})"
        raise NotAnImageError(f"{problem}: send a {KINDS} image.")
    if name in OF_THE_EXTRA:
        return ImageHeader(OF_THE_EXTRA[name], *read_size(view, name))
    if name not in DECODED:
        raise UnsupportedFormatError(f"{name} is not decoded: send {KINDS}.")
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
    """Yield (marker, start, end) of each segment's body, up to the end of the image or the bytes.

    It skips compressed data and other bytes between segments, as libjpeg does.
    """
    num_bytes = view.nbytes
    for _ in range(_MAX_SEGMENTS):
        # Nearly always a segment starts where the last one ended.
        is_within = position + 2 <= num_bytes
        if is_within and view[position] == 0xFF and view[position + 1] in _JPEG_MARKERS:
            start = position + 2
        elif (marker := _JPEG_MARKER.search(view, position)) is not None:
            start = marker.end()
        else:
            return
        if start + 2 > num_bytes:
            return
        position = start + (view[start] << 8 | view[start + 1])
        yield view[start - 1], start + 2, position
    raise CorruptImageError(f"The JPEG has more than {_MAX_SEGMENTS} segments: save it anew.")


def _read_jpeg(view: memoryview) -> ImageHeader | None:
    frame: tuple[int, int, int, bool] | None = None
    orientation: int | None = None
    for marker, start, end in jpeg_segments(view):
        if marker == 0xE1 and bytes(view[start : start + 6]) == _EXIF_START:
            if orientation is None:  # the first one counts, as in every viewer
                orientation = _read_orientation(view[start:end])
        elif marker in _JPEG_FRAMES:
            precision, height, width, components = struct.unpack_from(">BHHB", view, start)
            if precision != 8:
                raise UnsupportedFormatError(
                    f"JPEG with {precision} bits per sample is not decoded (8 are): "
                    "send JPEG, PNG or WebP."
                )
            if components not in _JPEG_COMPONENTS:
                raise UnsupportedFormatError(
                    f"JPEG with {components} components is not decoded (1, 3 and 4 are): "
                    "send a grey, colour or CMYK JPEG, PNG or WebP."
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
                "jpeg", width, height, orientation or 1, data_offset=start, has_many_scans=many
            )
        elif marker in (0xD9, 0xDA):
            return None
    return None


def _read_png(view: memoryview) -> ImageHeader | None:
    if bytes(view[12:16]) == b"CgBI":
        raise UnsupportedFormatError(
            "Xcode's PNG (CgBI, of an iOS application) is not decoded: "
            "send the picture from before it was built in, or JPEG, PNG or WebP."
        )
    if bytes(view[:16]) != _PNG_START:
        return None
    width, height, bit_depth, colour_type = struct.unpack_from(">IIBB", view, 16)
    has_alpha, orientation, gray = colour_type in (4, 6), None, None
    for kind, start, end in islice(png_chunks(view), _MAX_SEGMENTS):
        if kind == b"tRNS" and colour_type == 0:
            (gray,) = struct.unpack_from(">H", view, start)
        elif kind == b"tRNS":
            has_alpha = True
        elif kind == b"eXIf" and orientation is None:
            orientation = _read_orientation(view[start : end - 4])
        elif kind == b"IDAT":
            return ImageHeader(
                "png", width, height, orientation or 1, has_alpha, bit_depth, gray, start
            )
        elif kind not in _PNG_CRITICAL and kind[:1].isupper():  # unknown, but part of the picture
            raise UnsupportedFormatError(
                f"PNG with the critical chunk {kind!r} is not decoded: "
                "save it anew as JPEG, PNG or WebP."
            )
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
        width, height = bits & 0x3FFF, bits >> 14 & 0x3FFF
        if signature != 0x2F:
            return None
        has_alpha = _has_vp8l_alpha(view, start)
        return ImageHeader("webp", width + 1, height + 1, has_alpha=has_alpha, data_offset=start)
    return _read_extended_webp(view) if kind == b"VP8X" else None


def _read_extended_webp(view: memoryview) -> ImageHeader:
    flags, width, height = view[20], view[24:27], view[27:30]
    has_alpha, orientation = bool(flags & WEBP_ALPHA_FLAG), None
    for kind, start, end in islice(webp_chunks(view), _MAX_SEGMENTS):
        if kind == b"VP8L":  # decoders use this bit even if the flag is not set
            has_alpha |= _has_vp8l_alpha(view, start)
        elif kind == b"EXIF" and flags & 0x08 and orientation is None:
            orientation = _read_orientation(view[start:end])
    return ImageHeader(
        "webp",
        int.from_bytes(width, "little") + 1,
        int.from_bytes(height, "little") + 1,
        orientation or 1,
        has_alpha=has_alpha,
        data_offset=30,
    )


def _has_vp8l_alpha(view: memoryview, start: int) -> bool:
    (bits,) = struct.unpack_from("<I", view, start + 1)
    return bool(bits >> 28 & 1)


def webp_chunks(view: memoryview, position: int = 12) -> Iterator[tuple[bytes, int, int]]:
    """Yield (kind, start, end) of each chunk's body; the last may end after the file."""
    while position + 8 <= view.nbytes:
        kind, length = struct.unpack_from("<4sI", view, position)
        yield kind, position + 8, position + 8 + length
        position += 8 + length + length % 2


def _read_orientation(exif: memoryview) -> int:
    """Return the orientation (1 to 8) of Exif's first directory; 1 if absent or damaged.

    The TIFF header may follow ``_EXIF_START`` or come first. Some editors write ``_EXIF_START``
    twice.
    """
    while bytes(exif[:6]) == _EXIF_START:
        exif = exif[6:]
    if (order := {b"II": "<", b"MM": ">"}.get(bytes(exif[:2]))) is None:
        return 1
    try:
        (directory,) = struct.unpack_from(order + "I", exif, 4)
        (num_entries,) = struct.unpack_from(order + "H", exif, directory)
        for entry in range(directory + 2, directory + 2 + 12 * num_entries, 12):
            tag, kind = struct.unpack_from(order + "HH", exif, entry)
            if tag == ORIENTATION_TAG:
                size = "I" if kind == _LONG else "H"
                (value,) = struct.unpack_from(order + size, exif, entry + 8)
                return int(value) if 1 <= value <= 8 else 1
    except struct.error:
        pass
    return 1


_PARSERS = {"jpeg": _read_jpeg, "png": _read_png, "webp": _read_webp}


def check_limits(header: ImageHeader, max_pixels: int) -> None:
    """Raise TooManyPixelsError if the announced size is over ``max_pixels`` or OpenCV's limit."""
    width, height = header.width, header.height
    if width * height > max_pixels:
        raise TooManyPixelsError(
            f"The {header.format.upper()} has {width} x {height} = {width * height:,} pixels; "
            f"at most {max_pixels:,} are decoded: send a smaller picture."
        )
    if max(width, height) > _MAX_SIDE:
        raise TooManyPixelsError(
            f"The {header.format.upper()} has {width} x {height} pixels; "
            f"at most {_MAX_SIDE:,} a side are decoded: send a smaller picture."
        )


def check_full_pixels(
    header: ImageHeader, full_pixels: int, max_full_pixels: int, *, of_regions: bool = False
) -> None:
    """Raise TooManyPixelsError if decoding would make more than ``max_full_pixels``."""
    if full_pixels > max_full_pixels:
        twice = " (16-bit samples count twice)" if header.bit_depth > 8 else ""
        why, remedy = "cannot be decoded at reduced scale", ", or an ordinary JPEG"
        if of_regions:
            why, remedy = "is decoded at full scale for its regions", ", or the regions as pictures"
        raise TooManyPixelsError(
            f"The {header.format.upper()} has {header.width} x {header.height} pixels{twice} and "
            f"{why}; then at most {max_full_pixels:,} are decoded: send a smaller picture{remedy}."
        )


def check_complete(view: memoryview, header: ImageHeader) -> None:
    """Refuse a file without its end; bytes after the end are allowed."""
    if header.format in HEIF_FORMATS:
        return  # decoding refuses it
    if header.format == "webp":
        is_complete = int.from_bytes(view[4:8], "little") + 8 <= view.nbytes
    elif header.format == "png":
        is_complete = has_png_end(view, header.data_offset - 8)
    else:  # nearly always the end comes last, so look there first
        near_end = max(header.data_offset, view.nbytes - 16)
        ends = (_JPEG_END.search(view, start) for start in (near_end, header.data_offset))
        is_complete = any(ends)
    if not is_complete:
        raise _truncated(view, header)
    if header.has_many_scans:
        _check_scans(view, header)


def check_first_end(view: memoryview, header: ImageHeader) -> None:
    """Refuse a JPEG that was cut off before another one in the same file."""
    first = _JPEG_START_OR_END.search(view, header.data_offset)
    if first is None or first.group()[1] != 0xD9:
        raise _truncated(view, header)


def _truncated(view: memoryview, header: ImageHeader) -> CorruptImageError:
    return CorruptImageError(
        f"The {header.format.upper()} is truncated: its {view.nbytes} bytes hold no end of "
        "the picture. Send the whole file."
    )


def _check_scans(view: memoryview, header: ImageHeader) -> None:
    num_scans = 1
    for marker, _, _ in jpeg_segments(view, header.data_offset):
        if marker == 0xD9 or num_scans > _MAX_SCANS:
            break
        num_scans += marker == 0xDA
    if num_scans > _MAX_SCANS:
        raise UnsupportedFormatError(
            f"The JPEG has more than {_MAX_SCANS} scans, the most that are decoded: "
            "save it again as an ordinary JPEG."
        )
