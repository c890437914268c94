"""Image files: found in folders and stores by name, recognised by their first bytes; HEIC and AVIF.

Signatures are from each format's specification; those of boxes (HEIC, AVIF) are the brands
registered at mp4ra.org.

OpenCV gets a PNG with the chunks of the default picture only. It would refuse metadata of 8 MB,
show an animation's first frame instead of its default picture, and check IEND's checksum. The
picture does not depend on any of these.

HEIC (libheif) and AVIF (libavif) need the extra ``heif``. Both packages read a header without
decoding, and the limits are checked in between. Orientation is applied once: libheif applies irot,
imir and clap while decoding, Pillow reports irot and imir for an AVIF. Exif's orientation is
ignored in both.
"""

import io
import math
import os
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from itertools import product
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from models.errors import CorruptImageError, StoreError, TandemError, UnsupportedFormatError
from models.machine import needs_extra, pip_install

if TYPE_CHECKING:
    from PIL.AvifImagePlugin import AvifImageFile
    from pillow_heif import HeifFile

DECODED = ("jpeg", "png", "webp")
HAS_HEIF = find_spec("pillow_heif") is not None  # the extra heif, for HEIC and AVIF
KINDS = "JPEG, PNG, WebP, HEIC or AVIF" if HAS_HEIF else "JPEG, PNG or WebP"  # to be sent
OF_THE_EXTRA = {"HEIC": "heic", "HEIF": "heic", "AVIF": "avif"}  # by name; ImageHeader's names
_SIGNATURES: dict[str, tuple[bytes, ...]] = {
    "jpeg": (b"\xff\xd8\xff",),
    "png": (b"\x89PNG",),
    "GIF": (b"GIF87a", b"GIF89a"),
    "TIFF": (b"II*\x00", b"MM\x00*", b"II+\x00", b"MM\x00+"),
    "JPEG XR": (b"II\xbc\x01",),
    "JPEG 2000": (b"\x00\x00\x00\x0cjP  \r\n\x87\n", b"\xff\x4f\xff\x51"),
    "JPEG XL": (b"\x00\x00\x00\x0cJXL \r\n\x87\n", b"\xff\x0a"),
    "PDF": (b"%PDF-",),
    "PostScript": (b"%!PS",),
    "PSD": (b"8BPS",),
    "QOI": (b"qoif",),
    "OpenEXR": (b"\x76\x2f\x31\x01",),
    "Radiance HDR": (b"#?RADIANCE",),
}
_BRANDS = {
    **dict.fromkeys((b"avif", b"avis"), "AVIF"),
    **dict.fromkeys((b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx"), "HEIC"),
    **dict.fromkeys((b"mif1", b"msf1", b"mif2"), "HEIF"),
}
# Zero, a type, and the number of pictures, at least 1.
_ICON = re.compile(rb"\x00\x00([\x01\x02])\x00(?!\x00\x00)")
# TGA has no signature. Its header: the length of a text; without a colour map (zeros) a true-colour
# or grey picture, or with one; the origin; width and height above 0; bits per pixel.
_TGA = re.compile(
    rb".(?:\x00[\x02\x03\x0a\x0b]\x00{5}|\x01[\x01\x09].{4}[\x0f\x10\x18\x20]).{4}"
    rb"(?!\x00\x00)..(?!\x00\x00)..[\x08\x0f\x10\x18\x20]",
    re.S,
)
_PORTABLE_ANYMAP = re.compile(rb"P[1-7]\s[\s\d#]")
# An XML prologue, comments or a doctype may come first, in the first KB.
_SVG = re.compile(
    rb"(?:\xef\xbb\xbf)?\s*<(?:svg\b|(?:\?xml|!--|!DOCTYPE)(?s:.){,1000}<svg\b)", re.I
)
# Sizes of the BMP information headers in use (OS/2 1.x, 3.x, and Windows 3 to 5), at byte 14.
_BMP_HEADERS = frozenset({12, 16, 40, 52, 56, 64, 108, 124})
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# Encoders write at least 8 KB of pixels per chunk; many tiny chunks are an attack.
_MAX_CHUNKS = 2**16
_read_chunk = struct.Struct(">I4s").unpack_from  # length and kind
_PIXELS = frozenset({b"IDAT"})
_BEFORE_PIXELS = _PIXELS | {b"IHDR", b"PLTE", b"tRNS"}
_END = b"\0\0\0\0IEND\xaeB`\x82"
HEIF_EXTRA, HEIF_FORMATS = "heif", ("heic", "avif")  # formats of an ImageHeader
_MAX_PICTURES = 1000  # in a file; only the first, or the primary one, is decoded
ORIENTATION_TAG = 0x0112  # of Exif
# Of a file's boxes and announced sizes; libheif allows 1,000 items, one for each tile.
_MAX_BOXES, _MAX_SIZES = 256, 4096
_ERRORS = (ValueError, RuntimeError, SyntaxError, EOFError, OSError, LookupError)


# What clients send in place of an image: how it begins, what it is, and what to send instead.
_OWN_BYTES = (
    "send the file's own bytes, as curl --data-binary @photo.jpg does, or "
    '{"instances": [{"b64": ...}]} to /v1/models/SET:predict'
)
_AS_TENSOR = 'save it as PNG, or send its values to /v2/models/SET/infer as the input "pixels"'
_UNPACKED = "send it unpacked, or gzip with Content-Encoding: gzip"
_WRAPPINGS = tuple(
    (re.compile(rb"(?:\xef\xbb\xbf)?\s*" + begins, re.I), name, remedy)
    for begins, name, remedy in (
        (rb"(?:\[object \w+\]|undefined|null)\s*\Z", "JavaScript's text of an object", _OWN_BYTES),
        (rb"[{\[]", "JSON", _OWN_BYTES),
        (rb"(?:array|tensor)\(", "the text of an array", _AS_TENSOR),
        (rb"data:", "a data URL", _OWN_BYTES),
        (rb"https?://", "an address, and the service fetches nothing", _OWN_BYTES),
        (rb"['\"]?(?:[/_]9j[/_]|iVBORw0KGgo|UklGR)", "base64", _OWN_BYTES),
        (rb"(?:0x)?(?:ffd8ff|89504e47|52494646)", "hexadecimal text", _OWN_BYTES),
        (
            rb"(?:bytearray\()?b['\"](?:\\x|RIFF)",
            "the text that Python writes of bytes",
            _OWN_BYTES,
        ),
        (
            rb"(?:\xef\xbf\xbd){2}|\xef\xbf\xbdPNG|\xc3\xbf\xc3\x98\xc3\xbf|\xc2\x89PNG",
            "a file that was read as text",
            f"read it as bytes, and {_OWN_BYTES}",
        ),
        (
            rb"[\w.\[\]%+-]{1,64}=[\w.%+*/:;,&-](?:[\w.%+*/:;,&=-])*\Z",
            "a form of text (application/x-www-form-urlencoded)",
            _OWN_BYTES,
        ),
        (
            rb"--[^\r\n]{1,250}\r?\ncontent-",
            "a form without its Content-Type",
            "send multipart/form-data with its boundary, as curl -F files=@photo.jpg does",
        ),
        (rb"\x93NUMPY", "a NumPy array (.npy)", _AS_TENSOR),
        (rb"PK\x03\x04(?s:.{26})[\w-]{1,60}\.npy", "NumPy arrays (.npz)", _AS_TENSOR),
        (rb"PK\x03\x04|\x1f\x8b\x08|x[\x01\x9c\xda]", "compressed (ZIP, gzip or zlib)", _UNPACKED),
        (
            rb"\x80[\x02-\x05][\x95\x8c\x8e\]}cCBXUq(KMJNG]|c(?:numpy|builtins|copy_?reg|_codecs)"
            rb"[\w.]*\r?\n|\([dl]p\d|[\]}]q\x00",
            "a pickle, which is never read",
            _AS_TENSOR,
        ),
    )
)
_FILE_NAME = re.compile(rb"[^\r\n]{0,190}\.(?:jpe?g|png|webp|heic|avif)\s*", re.I)
_SMALLEST_SIDE = 8  # of pixels without a format
_SHAPES = ((1, 1), (4, 3), (3, 2), (16, 9))
SUFFIXES: tuple[str, ...] = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp")
if HAS_HEIF:
    SUFFIXES = (*SUFFIXES, ".heic", ".heif", ".avif")
SEPARATOR = "://"  # of a URL
_MACOS_FOLDER = "__MACOSX"  # in ZIP archives of macOS: metadata files with the pictures' names


def name_wrapping(view: memoryview) -> tuple[str, str] | None:
    """Return what an image is wrapped in, and what to send instead; None if that is unknown."""
    start = bytes(view[:400])
    if _FILE_NAME.fullmatch(start) and view.nbytes < len(b"." * 200):
        name = start.decode("utf-8", "replace")
        remedy = "send the file's own bytes, as curl --data-binary @photo.jpg does, with an @"
        return f"the text {name!r}", remedy
    if (wrapping := name_beginning(start)) is not None:
        return wrapping
    is_text = start.isascii() and "".join(start.decode().split()).isprintable()
    if not is_text and (sizes := _sizes_of(view.nbytes)):
        return f"as many as {' or '.join(sizes[:2])} pixels without a format", _AS_TENSOR
    return None


def name_beginning(start: bytes) -> tuple[str, str] | None:
    """Return what an image is wrapped in by its first bytes, and what to send instead."""
    matches = ((name, remedy) for begins, name, remedy in _WRAPPINGS if begins.match(start))
    return next(matches, None)


def _sizes_of(num_bytes: int) -> list[str]:
    """Return the pictures of usual shapes, RGB or else RGBA, of this size in bytes."""
    sizes = list[str]()
    for channels, (width, height) in product((3, 4), _SHAPES):
        if channels == 4 and sizes:
            break
        side = math.isqrt(num_bytes // (channels * width * height))
        is_whole = channels * width * height * side**2 == num_bytes
        if is_whole and side * height >= _SMALLEST_SIDE:
            sizes.append(f"{width * side} x {height * side}")
    return sizes


def name_format(view: memoryview) -> str | None:
    """Return one of ``DECODED``, the name of a format that is not decoded, or None if unknown."""
    start = bytes(view[:1100])
    for name, signatures in _SIGNATURES.items():
        if start.startswith(signatures):
            return name
    if start[:4] == b"RIFF" and start[8:12] == b"WEBP":
        return "webp"
    if start[4:8] == b"ftyp":
        brand = _BRANDS.get(start[8:12])
        if brand == "HEIF":  # a general brand: the compatible ones say more
            end = min(int.from_bytes(start[:4]), len(start))
            names = {_BRANDS.get(start[place : place + 4]) for place in range(16, end, 4)}
            return next((name for name in ("HEIC", "AVIF") if name in names), brand)
        return brand
    if start[:2] == b"BM" and int.from_bytes(start[14:18], "little") in _BMP_HEADERS:
        return "BMP"
    if icon := _ICON.match(start):
        return "ICO" if icon[1] == b"\1" else "CUR"
    if _TGA.match(start):
        return "TGA"
    if _PORTABLE_ANYMAP.match(start):
        return "PNM"
    return "SVG" if _SVG.match(start) else None


def png_chunks(view: memoryview, position: int = 8) -> Iterator[tuple[bytes, int, int]]:
    """Yield (kind, start of the body, end of the checksum) of each chunk that begins in the file.

    The last chunk may end after the file. Checksums are not verified.
    """
    last = view.nbytes - 8  # the last place for a chunk's length and kind
    for _ in range(_MAX_CHUNKS):
        if position > last:
            return
        length, kind = _read_chunk(view, position)
        start, position = position + 8, position + 12 + length
        yield kind, start, position


def has_png_end(view: memoryview, position: int) -> bool:
    """Whether all chunks from ``position`` up to IEND are complete."""
    for kind, _, end in png_chunks(view, position):
        if kind == b"IEND":
            return end <= view.nbytes
    return False


def default_picture(view: memoryview) -> memoryview | bytes:
    """Return a PNG of the file's IHDR, PLTE, tRNS and IDAT: an animation's default picture.

    PLTE and tRNS only count before the pixels, by the specification. A file that begins with these
    and IEND is not copied.
    """
    spans = [slice(0, 8)]
    wanted = _BEFORE_PIXELS
    for kind, start, end in png_chunks(view):
        if kind == b"IDAT":
            wanted = _PIXELS
        elif kind == b"IEND":
            if len(spans) == 1 and view[start - 8 : end] == _END:
                return view[:end]
            break
        if kind not in wanted:
            continue
        if spans[-1].stop == start - 8:  # adjacent chunks are copied in one piece
            spans[-1] = slice(spans[-1].start, end)
        else:
            spans.append(slice(start - 8, end))
    return b"".join([*(view[span] for span in spans), _END])


class HeifSize(NamedTuple):
    """A header's properties: the sides as decoded, and Exif's orientation."""

    width: int
    height: int
    orientation: int
    has_alpha: bool


def read_size(view: memoryview, name: str) -> HeifSize:
    """Read the header of a HEIC, HEIF or AVIF file, without decoding.

    Raises:
        UnsupportedFormatError: the extra is not installed, or there are too many pictures.
        CorruptImageError: the header is cut short or damaged.
    """
    try:
        import pillow_heif  # noqa: F401
    except ModuleNotFoundError as error:
        raise UnsupportedFormatError(
            f"{name} is not decoded: send JPEG, PNG or WebP, or install what decodes it where the "
            f"service runs: {pip_install(HEIF_EXTRA)}."
        ) from error
    width, height = _largest_announced(view)
    if not width * height:
        raise CorruptImageError(
            f"The {name} header is cut short or damaged ({view.nbytes} bytes in all): "
            "send the whole file."
        )
    try:
        if name == "AVIF":
            with _avif(view) as avif:
                orientation = avif.getexif().get(ORIENTATION_TAG, 1)
                size = HeifSize(avif.width, avif.height, orientation, "A" in avif.mode)
                num_pictures = avif.n_frames
        else:
            heic = _heic(view)
            primary = heic[heic.primary_index]
            (wide, high), num_pictures = primary.size, len(heic)
            size = HeifSize(wide, high, 1, primary.has_alpha)
    except _ERRORS:  # over the library's limit and ours; or decoding gives the reason
        size, num_pictures = HeifSize(width, height, 1, False), 1
    if num_pictures > _MAX_PICTURES:
        raise UnsupportedFormatError(
            f"{name} with {num_pictures:,} pictures is not decoded (up to {_MAX_PICTURES:,} are): "
            "send one of them, or JPEG, PNG or WebP."
        )
    if width * height > 4 * size.width * size.height:
        # A cut-out may be small, but decoding it needs the whole: the limits are for the whole.
        return size._replace(width=width, height=height)
    return size


def decode_heif(view: memoryview, format: str) -> NDArray[np.uint8]:
    """Return the picture as stored: (h, w) grey, (h, w, 3) BGR or (h, w, 4) BGRA, 8 bits.

    Raises:
        CorruptImageError: the picture cannot be decoded.
        TandemError: there is not enough memory.
    """
    try:
        if format == "avif":
            with _avif(view) as avif:
                mode, code = "RGB", cv2.COLOR_RGB2BGR
                if "A" in avif.mode:
                    mode, code = "RGBA", cv2.COLOR_RGBA2BGRA
                return np.asarray(cv2.cvtColor(np.asarray(avif.convert(mode)), code), np.uint8)
        heic = _heic(view)
        primary = heic[heic.primary_index]
        pixels = np.asarray(primary)
        if primary.premultiplied_alpha:
            return np.asarray(cv2.cvtColor(pixels, cv2.COLOR_mRGBA2RGBA), np.uint8)
        return pixels
    except MemoryError as error:
        raise TandemError(f"No memory for the {format.upper()}'s pixels.") from error
    except _ERRORS as error:
        raise CorruptImageError(
            f"The {format.upper()} cannot be decoded ({' '.join(str(error).split())[:200]}): the "
            "file is damaged. Send it again, or save it anew."
        ) from error


def _heic(view: memoryview) -> "HeifFile":
    import pillow_heif

    options = pillow_heif.options
    options.DECODE_THREADS = 0  # pictures are decoded concurrently
    options.THUMBNAILS = options.DEPTH_IMAGES = options.AUX_IMAGES = False
    return pillow_heif.open_heif(bytes(view), bgr_mode=True)


def _avif(view: memoryview) -> "AvifImageFile":
    from PIL import AvifImagePlugin

    AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # pictures are decoded concurrently
    return AvifImagePlugin.AvifImageFile(io.BytesIO(view))


def _largest_announced(view: memoryview) -> tuple[int, int]:
    """Return the largest size in the ``ispe`` boxes of ``meta`` (ISO/IEC 23008-12, 6.5.3).

    (0, 0) if there are none, or too many to read.
    """
    sizes, position = [(0, 0)], 0
    for _ in range(_MAX_BOXES):
        if position + 16 > view.nbytes:
            break
        length, kind = struct.unpack_from(">I4s", view, position)
        if length == 1:  # a 64-bit length follows
            (length,) = struct.unpack_from(">Q", view, position + 8)
        end = position + length if length else view.nbytes
        if kind == b"meta":
            bodies = bytes(view[position:end]).split(b"ispe\0\0\0\0", _MAX_SIZES)[1:]
            if len(bodies) == _MAX_SIZES:
                return 0, 0
            sizes += [struct.unpack_from(">II", body) for body in bodies if len(body) >= 8]
        position = max(end, position + 8)
    return max(sizes, key=lambda size: size[0] * size[1])


def images_below(folder: Path) -> list[Path]:
    """Return every image file below ``folder``, sorted; follows links to folders."""
    paths: list[Path] = []
    for place, folders, names in os.walk(folder, followlinks=True):
        here = Path(place)
        seen = [here / name for name in folders if not is_hidden(name)]
        loops = [p for p in seen if p.is_symlink() and here.resolve().is_relative_to(p.resolve())]
        folders[:] = [path.name for path in seen if path not in loops]
        paths += [here / name for name in names if is_image(here / name)]
    return sorted(paths)


def is_image(path: Path) -> bool:
    """Whether a path is a file with an image's suffix, and not hidden (as macOS's ``._*``)."""
    return path.suffix.lower() in SUFFIXES and not is_hidden(path.name) and path.is_file()


def is_hidden(name: str) -> bool:
    """Whether a file or folder of this name is skipped when a whole folder is read."""
    return name.startswith(".") or name == _MACOS_FOLDER


def first_not_utf8(names: Iterable[str]) -> bytes | None:
    """Return the first name that is not UTF-8, as old archives have them; None without one."""
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            return os.fsencode(name)
    return None


def is_store(name: str) -> bool:
    """Whether a name is a store's URL rather than a path."""
    return SEPARATOR in name


def opened_store(url: str) -> tuple[Any, str]:
    """Return the ``pyarrow.fs.FileSystem`` of a store's URL, and the path in it.

    Raises:
        MissingExtraError: pyarrow is not installed.
        StoreError: there is no filesystem for URLs of this kind.
    """
    with needs_extra("parquet", f"classify-offline with {url}"):
        import pyarrow.fs
    scheme, _, path = url.partition(SEPARATOR)
    host = path.partition("/")[0]  # a path may contain # and %, which a URL may not
    try:
        filesystem, _ = pyarrow.fs.FileSystem.from_uri(f"{scheme}{SEPARATOR}{host}")
    except (ValueError, OSError) as error:
        problem = f"cannot open {url}: {error}; write s3://BUCKET/FOLDER or gs://"
        raise StoreError(problem) from error
    return filesystem, path.rstrip("/")


def read_image(name: str) -> bytes:
    """Return the content of a file or a store's object; raise :class:`OSError` if unreadable."""
    if not is_store(name):
        return Path(name).read_bytes()
    filesystem, path = opened_store(name)
    with filesystem.open_input_stream(path) as stream:
        content: bytes = stream.read()
    return content


def file_stamps(names: Sequence[str]) -> list[tuple[int, int] | None]:
    """Return the bytes and the time of change (ns) of files and objects; None of an absent one."""
    stamps: dict[str, tuple[int, int] | None] = {}
    stores: dict[str, list[str]] = {}
    for name in names:
        if is_store(name):
            stores.setdefault("/".join(name.split("/")[:3]), []).append(name)
            continue
        try:
            status = Path(name).stat()
            stamps[name] = status.st_size, status.st_mtime_ns
        except OSError:
            stamps[name] = None
    for host, urls in stores.items():
        filesystem, _ = opened_store(host)
        infos = filesystem.get_file_info([url.partition(SEPARATOR)[2] for url in urls])
        for url, info in zip(urls, infos, strict=True):
            stamps[url] = (info.size, info.mtime_ns or 0) if info.is_file else None
    return [stamps[name] for name in names]


def images_at(url: str) -> list[str]:
    """Return the URLs of all images below a store's folder, sorted; for an object its own URL.

    Raises :class:`StoreError` if there are no images, or the store cannot be listed.
    """
    import pyarrow.fs

    filesystem, path = opened_store(url)
    try:
        (place,) = filesystem.get_file_info([path])
        if place.is_file:
            return [url]
        infos = filesystem.get_file_info(pyarrow.fs.FileSelector(path, recursive=True))
    except OSError as error:
        raise StoreError(f"cannot list {url}: {error}") from error
    below = len(PurePosixPath(path).parts)
    scheme = url.partition(SEPARATOR)[0]
    names = [
        info.path
        for info in infos
        if info.is_file
        and info.path.lower().endswith(SUFFIXES)
        and not any(map(is_hidden, PurePosixPath(info.path).parts[below:]))
    ]
    if not names:
        raise StoreError(f"no {KINDS} in {url}; name another folder")
    return [f"{scheme}{SEPARATOR}{name}" for name in sorted(names)]
