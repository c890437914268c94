"""Rejects files by their header and end, before pixels are decoded or allocated."""

import re

from models import image_heif
from models.errors import CorruptImageError, TooManyPixelsError, UnsupportedFormatError
from models.image_header import ImageHeader, jpeg_segments
from models.image_png import has_png_end

# OpenCV's own limit on either side (CV_IO_MAX_IMAGE_WIDTH, CV_IO_MAX_IMAGE_HEIGHT).
_MAX_SIDE = 2**20
# Each scan passes over the whole picture; encoders write about 10, an attack thousands.
_MAX_SCANS = 100
# In compressed data FF is followed by 00 or a restart marker, so it contains neither of these.
_JPEG_END = re.compile(rb"\xff\xd9")
_JPEG_START_OR_END = re.compile(rb"\xff[\xd8\xd9]")


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


def check_full_pixels(header: ImageHeader, full_pixels: int, max_full_pixels: int) -> None:
    """Raise TooManyPixelsError if decoding would make more than ``max_full_pixels``."""
    if full_pixels > max_full_pixels:
        twice = " (16-bit samples count twice)" if header.bit_depth > 8 else ""
        raise TooManyPixelsError(
            f"The {header.format.upper()} has {header.width} x {header.height} pixels{twice} and "
            f"cannot be decoded at reduced scale; then at most {max_full_pixels:,} are decoded: "
            "send a smaller picture, or an ordinary JPEG."
        )


def check_complete(view: memoryview, header: ImageHeader) -> None:
    """Refuse a file without its end; bytes after the end are allowed."""
    if header.format in image_heif.FORMATS:
        return  # decoding refuses it
    if header.format == "webp":
        is_complete = int.from_bytes(view[4:8], "little") + 8 <= view.nbytes
    elif header.format == "png":
        is_complete = has_png_end(view, header.data_offset - 8)
    else:  # nearly always the end comes last, so look there first
        near_end = max(header.data_offset, view.nbytes - 16)
        is_complete = bool(
            _JPEG_END.search(view, near_end) or _JPEG_END.search(view, header.data_offset)
        )
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
