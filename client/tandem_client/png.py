"""Encodes pixels as PNG (W3C, third edition): 8-bit RGB, lossless, using only zlib."""

import struct
import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_UP = 2  # filter type: each byte minus the one above; photographs compress better with it
_LEVEL = 1  # zlib's fastest: a local network is faster than stronger compression


def encode_png(rgb: "NDArray[np.uint8]") -> bytes:
    """Return (H, W, 3) uint8 RGB as a PNG file."""
    import numpy as np

    height, width, _ = rgb.shape
    rows = np.ascontiguousarray(rgb).reshape(height, 3 * width)
    filtered = np.empty((height, 1 + 3 * width), np.uint8)
    filtered[:, 0] = _UP
    filtered[0, 1:] = rows[0]
    np.subtract(rows[1:], rows[:-1], out=filtered[1:, 1:])  # modulo 256, as the filter requires
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, truecolour
    data = zlib.compress(filtered.tobytes(), _LEVEL)
    return _SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    checksum = zlib.crc32(data, zlib.crc32(kind))
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)
