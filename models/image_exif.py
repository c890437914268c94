"""Reads the orientation from Exif metadata (CIPA DC-008), as JPEG, PNG and WebP files carry it."""

import struct

EXIF_START = b"Exif\0\0"  # before the TIFF header: always in JPEG, by mistake in PNG and WebP
_ORIENTATION_TAG = 0x0112
_LONG = 4  # the type of 4-byte values; the tag should have SHORT, of 2 bytes


def read_orientation(exif: memoryview) -> int:
    """Return the orientation (1 to 8) of Exif's first directory; 1 if absent or damaged.

    The TIFF header may follow ``EXIF_START`` or come first. Some editors write ``EXIF_START``
    twice.
    """
    while bytes(exif[:6]) == EXIF_START:
        exif = exif[6:]
    order = {b"II": "<", b"MM": ">"}.get(bytes(exif[:2]))
    if order is None:
        return 1
    try:
        (directory,) = struct.unpack_from(order + "I", exif, 4)
        (num_entries,) = struct.unpack_from(order + "H", exif, directory)
        for entry in range(directory + 2, directory + 2 + 12 * num_entries, 12):
            tag, kind = struct.unpack_from(order + "HH", exif, entry)
            if tag == _ORIENTATION_TAG:
                size = "I" if kind == _LONG else "H"
                (value,) = struct.unpack_from(order + size, exif, entry + 8)
                return int(value) if 1 <= value <= 8 else 1
    except struct.error:
        pass
    return 1
