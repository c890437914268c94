"""Images that callers may pass, their encoding for a request, and the client's version."""

import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Union

from tandem_client.answers import BadImage

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_UP = 2  # filter type: each byte minus the one above; photographs compress better with it
_LEVEL = 1  # zlib's fastest: a local network is faster than stronger compression
DISTRIBUTION = "tandem-serve-client"  # as in pyproject.toml, which reads the version below
__version__ = "0.1.0"
Channels = Literal["rgb", "bgr"]  # the order of an array's channels: Pillow's, OpenCV's
Encoded: TypeAlias = bytes | bytearray | memoryview
# A file's path, its bytes (JPEG, PNG or WebP), or its pixels: (H, W, 3) uint8.
Image: TypeAlias = Union[str, os.PathLike[str], Encoded, "NDArray[np.uint8]"]


def images_of(image: Image | Sequence[Image]) -> tuple[Sequence[Image], bool]:
    """Return the images as a sequence, and whether the caller passed several."""
    if isinstance(image, Sequence) and not isinstance(image, str | Encoded):
        return image, True
    return [image], False


def path_of(image: Image) -> str | os.PathLike[str] | None:
    """Return the image's path; None if it is not a path."""
    return image if isinstance(image, str | os.PathLike) else None


def encoded(image: Image, channels: Channels | None) -> bytes:
    """Return the bytes to send: a file's content, given bytes, or an array as PNG.

    PNG keeps every pixel, so the answer is exactly for the array; the service scales and crops it
    like any file.

    Raises:
        BadImage: the file cannot be read, or the array is not (H, W, 3) uint8.
        ValueError: an array without ``channels``.
        TypeError: not a type of image.

    """
    if isinstance(image, bytes):
        return image
    if isinstance(image, Encoded):
        return bytes(image)
    if not isinstance(image, str | os.PathLike):
        return _encode(image, channels)
    try:
        return Path(image).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the path
        why = getattr(error, "strerror", None) or str(error)
        raise BadImage(f"cannot read the file: {why}", "unreadable") from error


def takes_long(image: Image | Sequence[Image]) -> bool:
    """Whether :func:`encoded` would read files or pack pixels, and so block an event loop."""
    return not isinstance(image, Encoded)


def _encode(pixels: Any, channels: Channels | None) -> bytes:
    shape, dtype = getattr(pixels, "shape", None), getattr(pixels, "dtype", None)
    if shape is None or dtype is None:
        raise TypeError(
            f"an image is a path, a file's bytes, or a NumPy array, not {type(pixels).__name__}"
        )
    if channels not in ("rgb", "bgr"):
        raise ValueError(
            f"channels is {channels!r}: say which order the array has, 'rgb' (Pillow, torchvision) "
            "or 'bgr' (OpenCV)"
        )
    if str(dtype) != "uint8" or len(shape) != 3 or shape[2] != 3 or not all(shape):
        raise BadImage(
            f"the array is {dtype} {tuple(shape)}; give uint8 (height, width, 3), 0 to 255",
            "bad_array",
        )
    return encode_png(pixels if channels == "rgb" else pixels[..., ::-1])


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
