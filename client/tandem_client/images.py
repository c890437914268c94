"""What a call sends: images, shrunk and encoded, and its options; the client's version."""

import io
import math
import os
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    NamedTuple,
    TypeAlias,
    TypedDict,
    TypeVar,
    Union,
)
from urllib.parse import quote

from tandem_client.answers import BadImage, Erased, Feedback, Taught

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LEAST_SENT_S = 0.001
SHRUNK = "x-tandem-shrunk"  # the sizes that shrunk pictures had
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_UP = 2  # filter type: each byte minus the one above; photographs compress better with it
_LEVEL = 1  # zlib's fastest: a local network is faster than stronger compression
DISTRIBUTION = "tandem-serve-client"  # as in pyproject.toml, which reads the version below
__version__ = "0.1.0"
DEFAULT_SIDE = 256  # px: to which most networks' pictures are scaled before the crop
SHRINK_FACTOR = 2  # the service then scales down once more, as it would from the whole picture
_JPEG_QUALITY = 90
_ORIENTATION = 0x0112  # Exif's tag
_READABLE = ("JPEG", "PNG", "WEBP")
_GREY = frozenset({"1", "L", "LA"})
_SHRUNK = _GREY | {"P", "PA", "RGB", "RGBA", "CMYK"}  # Pillow's modes; others have 16 bits and more
T = TypeVar("T")
Channels = Literal["rgb", "bgr"]  # the order of an array's channels: Pillow's, OpenCV's
Encoded: TypeAlias = bytes | bytearray | memoryview
# A file's path, its bytes (JPEG, PNG or WebP), or its pixels: (H, W, 3) uint8.
Image: TypeAlias = Union[str, os.PathLike[str], Encoded, "NDArray[np.uint8]"]


class ShrunkFile(NamedTuple):
    """A file to send, and the size that the picture had; None if it is sent as it is."""

    data: bytes
    before: tuple[int, int] | None = None  # width, height, px

    @property
    def size_before(self) -> str:
        """The size before as WIDTHxHEIGHT; "-" for a file as it is."""
        return "x".join(map(str, self.before)) if self.before else "-"


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
        return encode_png(_checked_rgb(image, channels))
    try:
        return Path(image).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the path
        why = getattr(error, "strerror", None) or str(error)
        raise BadImage(f"cannot read the file: {why}", "unreadable") from error


def takes_long(image: Image | Sequence[Image]) -> bool:
    """Whether :func:`encoded` would read files or pack pixels, and so block an event loop."""
    return not isinstance(image, Encoded)


def files_of(
    images: Sequence[Image], channels: Channels | None, shorter: int | None, is_form: bool
) -> tuple[list[ShrunkFile], dict[int, BadImage]]:
    """Return the files of a request's images, and the errors of those without, by index.

    With ``shorter`` they are :func:`shrunk`, with None :func:`encoded`. Raises :class:`BadImage` if
    the only image cannot be sent.
    """
    files, errors = [], {}
    for index, image in enumerate(images):
        try:
            if shorter is None:
                files.append(ShrunkFile(encoded(image, channels)))
            else:
                files.append(shrunk(image, channels, shorter))
        except BadImage as error:
            if not is_form:
                raise
            errors[index] = error
    return files, errors


def shorter_side(served: Any) -> int:
    """Return the shorter side of shrunk pictures, px, by the answer of GET /v1/models.

    It is twice the side to which the service scales pictures, so that it scales down once more.
    """
    sizes = served if isinstance(served, dict) else {}
    side = sizes.get("resize_shorter") or sizes.get("input_size")
    return SHRINK_FACTOR * (side if isinstance(side, int) and side > 0 else DEFAULT_SIDE)


def shrunk(image: Image, channels: Channels | None, shorter: int) -> ShrunkFile:
    """Return an image's file, scaled down so that its shorter side is ``shorter`` px.

    A smaller picture, a file that Pillow cannot read, and a file that would not get smaller are
    as :func:`encoded` returns them. The new file is a JPEG. It keeps Exif's orientation and the
    colour profile; transparency is laid over white, as the service does.

    Raises:
        ImportError: Pillow is not installed.
        BadImage, ValueError, TypeError: as :func:`encoded`.
    """
    pillow = _pillow()
    if not isinstance(image, str | os.PathLike | Encoded):
        rgb = _checked_rgb(image, channels)
        if min(rgb.shape[:2]) <= shorter:
            return ShrunkFile(encode_png(rgb))
        return ShrunkFile(_shrink(pillow.fromarray(rgb), shorter), rgb.shape[1::-1])
    data = encoded(image, channels)
    try:
        picture = pillow.open(io.BytesIO(data), formats=_READABLE)
        if min(picture.size) <= shorter or picture.mode not in _SHRUNK:
            return ShrunkFile(data)
        before, smaller = picture.size, _shrink(picture, shorter)
    except Exception:  # each decoder has errors of its own; the service says what is wrong
        return ShrunkFile(data)
    return ShrunkFile(smaller, before) if len(smaller) < len(data) else ShrunkFile(data)


def _pillow() -> Any:
    try:
        from PIL import Image as Pillow
    except ImportError as error:
        raise ImportError(
            "shrink=True needs Pillow: pip install 'tandem-serve-client[images]'"
        ) from error
    return Pillow


def _shrink(picture: Any, shorter: int) -> bytes:
    """Return Pillow's picture as a JPEG whose shorter side is ``shorter`` px."""
    pillow = _pillow()
    exif = pillow.Exif()
    exif.load(picture.info.get("exif", b""))  # not XMP's, which getexif reads and the service not
    orientation = exif.get(_ORIENTATION)
    profile = None if picture.mode == "CMYK" else picture.info.get("icc_profile")
    factor = shorter / min(picture.size)
    width, height = (max(shorter, round(side * factor)) for side in picture.size)
    # A JPEG is decoded at a reduced scale, at least twice as large as the result.
    picture.draft(None, (2 * width, 2 * height))
    mode = "L" if picture.mode in _GREY else "RGB"
    if picture.has_transparency_data:
        white = pillow.new("RGBA", picture.size, "white")
        picture = pillow.alpha_composite(white, picture.convert("RGBA"))
    picture = picture.convert(mode).resize((width, height), pillow.Resampling.BICUBIC)
    kept, file = pillow.Exif(), io.BytesIO()
    if orientation is not None:
        kept[_ORIENTATION] = orientation
    picture.save(file, "JPEG", quality=_JPEG_QUALITY, icc_profile=profile, exif=kept)
    return file.getvalue()


def _checked_rgb(pixels: Any, channels: Channels | None) -> "NDArray[np.uint8]":
    shape, dtype = getattr(pixels, "shape", None), getattr(pixels, "dtype", None)
    if shape is None or dtype is None:
        raise TypeError(
            f"an image is a path, a file's bytes, or a NumPy array, not {type(pixels).__name__}"
        )
    is_grey = len(shape) == 2 or shape[2:] == (1,)
    if not is_grey and channels not in ("rgb", "bgr"):
        raise ValueError(
            f"channels is {channels!r}: say which order the array has, 'rgb' (Pillow, torchvision) "
            "or 'bgr' (OpenCV)"
        )
    is_image = is_grey or (len(shape) == 3 and shape[2] == 3)
    if str(dtype) != "uint8" or not is_image or not all(shape):
        raise BadImage(
            f"the array is {dtype} {tuple(shape)}; give uint8 (height, width, 3), or (height, "
            "width) of grey, 0 to 255",
            "bad_array",
        )
    if is_grey:
        return pixels.reshape(*shape[:2], 1).repeat(3, axis=2)  # type: ignore[no-any-return]
    rgb: NDArray[np.uint8] = pixels if channels == "rgb" else pixels[..., ::-1]
    return rgb


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


class CallArguments(TypedDict, total=False):
    """The options of a call, as every client takes them; None is as if they were not there.

    Attributes:
        top_k: classes in the answer; None: the service's default.
        channels: "rgb" or "bgr", the order of an array's channels; not for files.
        timeout: seconds for this call, in place of the client's.
        priority: urgency of RFC 9218, 0 (first) to 7; from 4 on the image waits behind others.
        threshold: for a multi-label set, the lowest score of a label in the answer; None: the
            set's.
        model_set: for a service with several sets, the set's name; None: the first.
        plan: "full" asks every member, "fast" fewer where fewer suffice; None: the service's own.
        answer_set: whether to list the classes that hold the right one in 95 % of cases.
        embedding: the member whose pooled features the answer has.
        shrink: whether to scale large pictures down before they are sent (extra ``images``).
    """

    top_k: int | None
    channels: Channels | None
    timeout: float | None
    priority: int | None
    threshold: float | None
    model_set: str | None
    plan: str | None
    answer_set: bool | None
    embedding: str | None
    shrink: bool


Regions = Sequence[Sequence[float]]


@dataclass(frozen=True)
class CallOptions:
    """The checked :class:`CallArguments` of a call."""

    top_k: int | None = None
    channels: Channels | None = None
    timeout: float | None = None  # s
    priority: int | None = None
    threshold: float | None = None
    model_set: str | None = None
    plan: str | None = None
    answer_set: bool | None = None
    embedding: str | None = None
    shrink: bool = False
    regions: Regions | None = None  # (x, y, width, height) each

    def __post_init__(self) -> None:
        if self.regions is not None and self.shrink:
            raise ValueError("regions are of the picture as it is: leave shrink out")
        if self.timeout is not None:
            checked_timeout_s(self.timeout)
        if self.priority is not None and not 0 <= self.priority <= 7:
            raise ValueError(
                f"priority is {self.priority}: give an urgency of RFC 9218, 0 (first) to 7 (last)"
            )

    @property
    def query(self) -> dict[str, Any] | None:
        """The query parameters of a request; None without any."""
        names = ("top_k", "threshold", "model_set", "plan", "answer_set", "embedding")
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None} or None

    @property
    def boxes(self) -> list[list[float]] | None:
        """The regions as plain numbers, which may have been NumPy's."""
        return None if self.regions is None else [list(map(float, each)) for each in self.regions]


@dataclass(frozen=True)
class Call:
    """The images of a request as files; a form has an answer for each.

    ``errors`` are of a form's images that cannot be sent, by index: they have no file.
    """

    images: Sequence[Image]
    files: Sequence[ShrunkFile]
    errors: Mapping[int, BadImage]
    is_form: bool
    options: CallOptions

    @classmethod
    def of(
        cls, image: Image | Sequence[Image], options: CallOptions, shorter: int | None = None
    ) -> "Call":
        """Return the call for an image, or for several, shrunk to ``shorter`` px.

        Raises:
            BadImage: the only image cannot be sent.
            ValueError: there are no images.
        """
        images, is_form = images_of(image)
        if not images:
            raise ValueError("no images: give one or more")
        if is_form and options.regions is not None:
            raise ValueError(f"regions are of one image, not of a list of {len(images)}")
        files, errors = files_of(images, options.channels, shorter, is_form)
        return cls(images, files, errors, is_form, options)

    @property
    def has_results(self) -> bool:
        """Whether the answer is a list of results, of files or of regions."""
        return self.is_form or self.options.regions is not None

    @property
    def num_results(self) -> int:
        """How many results the service sends."""
        return len(self.files if self.options.regions is None else self.options.regions)

    def headers(self, left_s: float) -> dict[str, str]:
        """Return an attempt's headers; its time is never 0, which the service refuses."""
        headers = {"x-request-timeout-seconds": f"{max(left_s, LEAST_SENT_S):.3f}"}
        if self.options.priority is not None:
            headers["priority"] = f"u={self.options.priority}"
        if any(file.before for file in self.files):  # the sizes before, "-" of files as they are
            headers[SHRUNK] = ", ".join(file.size_before for file in self.files)
        return headers


@dataclass(frozen=True)
class Asked(Generic[T]):
    """A request to a route that does not classify; sent twice, it changes nothing more.

    ``kind`` is the class of its answer, ``body`` has httpx's arguments.
    """

    kind: Callable[..., T]
    method: str
    path: str
    query: Mapping[str, str | int] | None = None
    body: Mapping[str, Any] = field(default_factory=dict)

    def answer(self, fields: Mapping[str, Any]) -> T:
        """Parse the answer's JSON object; TypeError if a field is absent."""
        known = self.kind.__annotations__
        return self.kind(**{name: of for name, of in fields.items() if name in known})

    @staticmethod
    def teach(
        image: Image, label: str | int, channels: Channels | None, model_set: str | None
    ) -> "Asked[Taught]":
        """Return the request that teaches a photograph; :class:`BadImage` if it cannot be sent."""
        query = {"label": label} if model_set is None else {"label": label, "model_set": model_set}
        body = {"content": encoded(image, channels)}
        return Asked(Taught, "POST", "/v1/teach", query, body)

    @staticmethod
    def report(request_id: str, label: str | int, image: int | None) -> "Asked[Feedback]":
        """Return the request that reports the right label of an answered image."""
        said = {"request_id": request_id, "label": label, "image": image}
        body = {"json": {name: value for name, value in said.items() if value is not None}}
        return Asked(Feedback, "POST", "/v1/feedback", body=body)

    @staticmethod
    def erase(sample_id: str) -> "Asked[Erased]":
        """Return the request that erases the samples of a request, or a photograph."""
        return Asked(Erased, "DELETE", f"/v1/samples/{quote(sample_id, safe='')}")


def checked_timeout_s(timeout_s: float) -> float:
    """Return a call's time after checking it.

    Raises :class:`ValueError` if it is not a number of seconds above 0.
    """
    if not (timeout_s > 0 and math.isfinite(timeout_s)):
        raise ValueError(f"timeout is {timeout_s!r}: give seconds, a number above 0")
    return timeout_s
