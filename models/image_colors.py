"""Colours of decoded pictures: transparency over white, and wide gamut (Display P3) to sRGB.

Only profiles of a matrix and curves are used (ICC.1:2010, 8.4.2), which is what phones and cameras
embed. The codes of a colour space (ITU-T H.273), PNG's ``cICP`` and the ``nclx`` of HEIC and AVIF,
become a profile too: Display P3 and BT.2020, with curves of ordinary range. Tables of colours,
profiles for printing and larger ones are ignored, as all are without the setting. LittleCMS, in
Pillow, converts the networks' inputs rather than the whole picture: the difference is under a
level, and the cost is that of few pixels.
"""

import os
import struct
import zlib
from functools import lru_cache
from io import BytesIO
from itertools import islice
from typing import Any, Literal, get_args

import cv2
import numpy as np
from numpy.typing import NDArray

from models.errors import ModelSetError
from models.image_files import HEIF_FORMATS, png_chunks
from models.image_header import ImageHeader, jpeg_segments, webp_chunks
from models.machine import check_installed

IccProfiles = Literal["ignore", "convert"]
COLOR_EXTRA = "color"
PROFILES_VARIABLE = "TANDEM_ICC_PROFILES"  # the service's setting, which holds without one too
MAX_PROFILE_BYTES = 64 * 2**10  # of a matrix and curves; those of cameras have 0.5 to 4 KB
MAX_TAGS, MAX_CURVE = 100, 4096
MAX_SEGMENTS = 4096  # of a file, before its profile
HEIF_BYTES = 256 * 2**10  # from the start of a HEIC or AVIF, where its boxes are
JPEG_START = b"ICC_PROFILE\0"
# H.273: codes of primaries, as XYZ of red, green and blue adapted to D50; of transfer functions.
PRIMARIES = {
    9: ((0.67348, 0.27904, -0.00193), (0.16568, 0.67535, 0.02998), (0.12505, 0.0456, 0.79686)),
    12: ((0.51512, 0.2412, -0.00105), (0.29198, 0.69225, 0.04189), (0.1571, 0.06657, 0.78407)),
}
SRGB_TRANSFER = (1, 2, 6, 13, 14, 15)  # sRGB's, unknown, and BT.709's, which is shown as sRGB's
SRGB_CURVE = (2.4, 1 / 1.055, 0.055 / 1.055, 1 / 12.92, 0.04045)  # ICC's parametric type 3
GAMMA_22 = 4
CLASSES = (b"mntr", b"scnr", b"spac")
MATRIX = {b"rXYZ", b"gXYZ", b"bXYZ", b"rTRC", b"gTRC", b"bTRC"}
TABLES = (b"A2B", b"B2A", b"D2B", b"B2D")
NUM_LEVELS = 6  # of each colour, to see whether a profile differs from sRGB
NUM_TRANSFORMS = 64  # that are kept
_BAND_ROWS = 256  # rows composited at a time, which bounds the larger intermediates
Samples = NDArray[np.uint8] | NDArray[np.uint16]


def offline_profiles() -> IccProfiles:
    """Return whether profiles are converted where no service's settings say it.

    Raises :class:`ModelSetError` if the variable TANDEM_ICC_PROFILES is neither of both.
    """
    asked = os.environ.get(PROFILES_VARIABLE) or "ignore"
    for known in get_args(IccProfiles):
        if asked == known:
            return known  # type: ignore[no-any-return]
    raise ModelSetError(f"{PROFILES_VARIABLE}={asked}: it is ignore or convert")


def check_can_convert(icc_profiles: IccProfiles) -> None:
    """Raise :class:`MissingExtraError` if profiles are to be converted, and Pillow is missing."""
    if icc_profiles == "convert":
        check_installed("PIL", COLOR_EXTRA, "icc_profiles: convert")
        from PIL import ImageCms  # noqa: F401 - loaded before the first picture


def to_srgb(pixels: NDArray[np.uint8], view: memoryview, header: ImageHeader) -> None:
    """Convert a file's BGR pixels, flat uint8, in place if the file has another profile."""
    profile = embedded_profile(view, header.format)
    if profile is None or (transform := _transform_of(profile)) is None:
        return
    triples = pixels.reshape(-1, 3)
    triples[...] = _applied(transform, triples[:, ::-1])[:, ::-1]


def embedded_profile(view: memoryview, format: str) -> bytes | None:
    """Return the ICC profile of a file; None without one, or if it is large or damaged."""
    try:
        if format == "jpeg":
            profile = _of_jpeg(view)
        elif format == "png":
            profile = _of_png(view)
        elif format == "webp":
            chunks = islice(webp_chunks(view), MAX_SEGMENTS)
            profile = next((bytes(view[a:b]) for kind, a, b in chunks if kind == b"ICCP"), b"")
        else:
            profile = _of_heif(view) if format in HEIF_FORMATS else b""
    except (struct.error, zlib.error, IndexError):
        return None
    return profile if 0 < len(profile) <= MAX_PROFILE_BYTES else None


def _of_jpeg(view: memoryview) -> bytes:
    """Join the segments of the profile (ICC.1:2010, B.4), which count themselves."""
    parts, num, num_bytes = dict[int, memoryview](), 0, 0
    for marker, start, end in jpeg_segments(view):
        if marker == 0xDA or num_bytes > MAX_PROFILE_BYTES:
            break
        body = start + len(JPEG_START)
        if marker == 0xE2 and bytes(view[start:body]) == JPEG_START:
            place, num = view[body], view[body + 1]
            parts[place] = view[body + 2 : end]
            num_bytes += end - body
    is_whole = sorted(parts) == [*range(1, num + 1)]
    return b"".join(parts[place] for place in sorted(parts)) if is_whole else b""


def _of_png(view: memoryview) -> bytes:
    """Return the profile; codes that are known here come before it, as the specification says."""
    profile = b""
    for kind, start, end in islice(png_chunks(view), MAX_SEGMENTS):
        if kind == b"IDAT":
            break
        if kind == b"cICP" and (coded := _of_cicp(bytes(view[start : end - 4]))) is not None:
            return coded
        if kind == b"iCCP" and not profile:
            _, _, rest = bytes(view[start : end - 4]).partition(b"\0")
            profile = zlib.decompressobj().decompress(rest[1:], MAX_PROFILE_BYTES + 1)
    return profile


def _of_cicp(body: bytes) -> bytes | None:
    is_full_rgb = len(body) == 4 and body[2:] == b"\0\1"
    return _of_codes(body[0], body[1]) if is_full_rgb else None


def _of_heif(view: memoryview) -> bytes:
    """Return the profile of the first ``colr`` box that has one, else that of its codes."""
    boxes = bytes(view[:HEIF_BYTES])
    if (place := boxes.find(b"colrprof")) < 4:
        place = boxes.find(b"colrnclx")
        return b"" if place < 4 else _of_codes(*struct.unpack_from(">HH", boxes, place + 8)) or b""
    (length,) = struct.unpack_from(">I", boxes, place - 4)
    return boxes[place + 8 : place - 4 + length]


@lru_cache
def _of_codes(primaries: int, transfer: int) -> bytes | None:
    """Return a profile of H.273's codes, empty for sRGB's; None for codes that are not converted.

    HDR's transfer functions (PQ, HLG) are not: they need tone mapping.
    """
    if primaries == 1 and transfer in SRGB_TRANSFER:
        return b""
    if primaries not in PRIMARIES or transfer not in (GAMMA_22, *SRGB_TRANSFER):
        return None

    def fixed(*values: float) -> bytes:
        return struct.pack(f">{len(values)}i", *(round(value * 65536) for value in values))

    kind, numbers = (0, (2.2,)) if transfer == GAMMA_22 else (3, SRGB_CURVE)
    curve = b"para" + struct.pack(">IHH", 0, kind, 0) + fixed(*numbers)
    white = (0.9642, 1.0, 0.8249)  # D50
    bodies = {b"wtpt": b"XYZ " + bytes(4) + fixed(*white)}
    for letter, own in zip((b"r", b"g", b"b"), PRIMARIES[primaries], strict=True):
        bodies[letter + b"XYZ"] = b"XYZ " + bytes(4) + fixed(*own)
        bodies[letter + b"TRC"] = curve
    start, table, data = 132 + 12 * len(bodies), struct.pack(">I", len(bodies)), b""
    for tag, body in bodies.items():
        table += tag + struct.pack(">II", start + len(data), len(body))
        data += body
    header = struct.pack(">I", start + len(data)) + b"lcms\4\x30\0\0mntrRGB XYZ "
    header = header.ljust(36, b"\0") + b"acsp" + bytes(28) + fixed(*white)
    return header.ljust(128, b"\0") + table + data


def is_matrix(profile: bytes) -> bool:
    """Whether a profile is RGB of a matrix and curves, all within its bytes."""
    if len(profile) < 132 or profile[36:40] != b"acsp" or profile[12:16] not in CLASSES:
        return False
    (num,) = struct.unpack_from(">I", profile, 128)
    if profile[16:24] != b"RGB XYZ " or num > MAX_TAGS or 132 + 12 * num > len(profile):
        return False
    rows = struct.iter_unpack(">4sII", profile[132 : 132 + 12 * num])
    tags = {tag: (at, size) for tag, at, size in rows}
    if not tags.keys() >= MATRIX or any(tag[:3] in TABLES for tag in tags):
        return False
    for tag in MATRIX:
        at, size = tags[tag]
        if size < 12 or at + size > len(profile):
            return False
        kind, count = profile[at : at + 4], int.from_bytes(profile[at + 8 : at + 12])
        if tag.endswith(b"TRC") and not (
            kind == b"para" or (kind == b"curv" and count <= MAX_CURVE and 12 + 2 * count <= size)
        ):
            return False
    return True


@lru_cache(NUM_TRANSFORMS)
def _transform_of(profile: bytes) -> Any:
    """Return LittleCMS's transform to sRGB; None for one that is no other, or is not used."""
    from PIL import ImageCms

    if not is_matrix(profile):
        return None
    try:
        own, srgb = ImageCms.ImageCmsProfile(BytesIO(profile)), ImageCms.createProfile("sRGB")
        intent = ImageCms.Intent.RELATIVE_COLORIMETRIC
        transform = ImageCms.buildTransform(own, srgb, "RGB", "RGB", intent)
    except (ImageCms.PyCMSError, OSError, ValueError):
        return None
    levels = np.linspace(0, 255, NUM_LEVELS).astype(np.uint8)
    colors = np.stack(np.meshgrid(levels, levels, levels), -1).reshape(-1, 3)
    difference = _applied(transform, colors).astype(np.int16) - colors
    return transform if np.abs(difference).max() > 1 else None


def _applied(transform: Any, triples: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return RGB triples, (N, 3), transformed."""
    from PIL import Image, ImageCms

    image = Image.fromarray(np.ascontiguousarray(triples)[None])
    row: NDArray[np.uint8] = np.asarray(ImageCms.applyTransform(image, transform))[0]
    return row


def lay_over_white(region: Samples, header: ImageHeader) -> NDArray[np.uint8]:
    """Composite OpenCV's decoded pixels to opaque BGR.

    (rows, columns) grey, (..., 3) BGR or (..., 4) BGRA, uint8 or uint16 -> (..., 3) uint8 BGR. It
    equals a browser's view on a white page: c * alpha + 255 * (1 - alpha). Opaque uint8 is returned
    unchanged.
    """
    if region.ndim == 3 and region.shape[2] == 3 and region.dtype == np.uint8:
        return region  # type: ignore[return-value]
    opaque = np.empty((*region.shape[:2], 3), np.uint8)
    for top in range(0, len(region), _BAND_ROWS):
        rows = slice(top, top + _BAND_ROWS)
        opaque[rows] = _band_over_white(region[rows], header)
    return opaque


def _band_over_white(band: Samples, header: ImageHeader) -> NDArray[np.uint8]:
    samples = band if band.dtype == np.uint8 else (band >> 8).astype(np.uint8)
    if band.ndim == 2:
        if (level := header.transparent_gray) is not None:
            largest = 2**header.bit_depth - 1  # decoding scales fewer bits to 0..255
            level = level & largest if header.bit_depth >= 8 else (level & largest) * 255 // largest
            samples = np.where(band == level, np.uint8(255), samples)
        return np.asarray(cv2.cvtColor(samples, cv2.COLOR_GRAY2BGR), np.uint8)
    if band.shape[2] == 3:
        return samples  # type: ignore[return-value]
    alpha = samples[..., 3:].astype(np.uint16)  # (rows, columns, 1)
    darkness = (255 - samples[..., :3]) * alpha  # (rows, columns, 3), at most 255 * 255
    return (255 - (darkness + 127) // 255).astype(np.uint8)
