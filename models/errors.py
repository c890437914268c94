"""The errors that callers may see, each with its HTTP status and a stable code.

A message has the offending value, the limit and a remedy. Every constructor passes all of its
arguments to ``Exception``: errors cross process borders by pickle, which calls the class with
``args`` again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar


class TandemError(Exception):
    """Root of the tree; the one argument is the message."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal"

    @property
    def message(self) -> str:
        return str(self.args[0]) if self.args else type(self).__name__


class ConfigError(TandemError):
    """The configuration cannot be used, or not on this machine."""

    code = "config"


class ImageError(TandemError):
    """The image itself is at fault: sending it again cannot help."""

    status = 400
    code = "not_an_image"


class NotAnImageError(ImageError):
    """The bytes are no image of any format known here (text, an empty body, zeros)."""


class CorruptImageError(ImageError):
    """The header announces a known format, but its pixels are truncated or damaged."""

    code = "corrupt_image"


class UnsupportedFormatError(ImageError):
    """An image, but of a format that is not decoded (GIF, SVG, TIFF, HEIC...)."""

    status = 415
    code = "unsupported_format"


class TooManyPixelsError(ImageError):
    """The header announces more pixels than the limit; nothing was decoded."""

    status = 422
    code = "too_many_pixels"


class OutsidePictureError(ImageError):
    """A region of a request is not within its picture, or has no pixel of it."""

    status = 422
    code = "outside_picture"


class ModelSetError(TandemError):
    """A model set cannot be used: a file missing or altered, a manifest that does not fit."""

    code = "model_set"


class StoreError(ModelSetError):
    """A store cannot be read or written, or what it has is not what the manifest says."""

    code = "store"
    answered: int | None = None  # the HTTP status of the store
    may_pass = False  # whether a retry may succeed


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise :class:`ModelSetError` if the operating system cannot read the file."""
    try:
        yield
    except OSError as error:
        raise ModelSetError(f"cannot read {path}: {error.strerror}") from error
