"""Which files are small photos: what a decoding process, or the event loop, may take."""

from models.image_header import ImageHeader

# Up to which a JPEG is a small photo, decoded in a few milliseconds.
SMALL_BYTES, SMALL_PIXELS = 256 * 2**10, 2**20


def is_small(header: ImageHeader) -> bool:
    """Whether it is a JPEG that takes a few milliseconds, at whatever scale it is decoded."""
    is_plain = header.format == "jpeg" and not header.has_many_scans
    return is_plain and header.width * header.height <= SMALL_PIXELS
