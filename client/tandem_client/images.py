"""What callers may give as an image, and the bytes that are sent for it."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Union

from tandem_client.errors import BadImage
from tandem_client.png import encode_png

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Channels = Literal["rgb", "bgr"]  # the order of an array's channels: Pillow's, OpenCV's
Encoded: TypeAlias = bytes | bytearray | memoryview
# A file's path, its bytes (JPEG, PNG or WebP), or its pixels: (H, W, 3) uint8.
Image: TypeAlias = Union[str, os.PathLike[str], Encoded, "NDArray[np.uint8]"]


def images_of(given: Image | Sequence[Image]) -> tuple[Sequence[Image], bool]:
    """Return the images that were given, and whether they were given as several."""
    if isinstance(given, Sequence) and not isinstance(given, str | Encoded):
        return given, True
    return [given], False


def path_of(image: Image) -> str | os.PathLike[str] | None:
    """Return the image's path; None if it is given otherwise."""
    return image if isinstance(image, str | os.PathLike) else None


def encoded(image: Image, channels: Channels | None) -> bytes:
    """Return a file's bytes: read, as they are, or an array's as PNG.

    PNG keeps every pixel, so that the answer is the one for the array; the service scales and
    crops it as it does with any file.

    Raises:
        BadImage: the file cannot be read, or the array is not (H, W, 3) uint8.
        ValueError: an array without ``channels``.
        TypeError: none of what an image may be.

    """
    if isinstance(image, bytes):
        return image
    if isinstance(image, Encoded):
        return bytes(image)
    if isinstance(image, str | os.PathLike):
        return _read(image)
    return _encode(image, channels)


def takes_long(given: Image | Sequence[Image]) -> bool:
    """Whether :func:`encoded` reads files or packs pixels, and an event loop must not do it."""
    return not isinstance(given, Encoded)


def _read(path: str | os.PathLike[str]) -> bytes:
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        why = getattr(error, "strerror", None) or str(error)
        raise BadImage(f"cannot read the file: {why}", "unreadable") from error


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
