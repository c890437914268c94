"""Image files that viewers and decoders read differently, each with its right picture or refusal.

All of them are made here, 32 x 32 pixels but for the animations, and stored as red left of blue.
"""

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tests.support.images import encode, make_png, png_chunk

SIDE = 32
RED, BLUE, GRAY, WHITE = (255, 0, 0), (0, 0, 255), (90, 90, 90), (255, 255, 255)
EXIF = b"Exif\0\0"

LEFT_RIGHT = np.full((SIDE, SIDE, 3), RED, np.uint8)  # uint8 RGB: red left of blue
LEFT_RIGHT[:, SIDE // 2 :] = BLUE
ABOVE_BELOW = LEFT_RIGHT.transpose(1, 0, 2)  # red above blue: turned as orientation 6 asks
PLAIN_GRAY, PLAIN_WHITE = (np.full_like(LEFT_RIGHT, colour) for colour in (GRAY, WHITE))


@dataclass(frozen=True)
class Case:
    """A file, and either what it shows or the error that refuses it."""

    name: str
    make: Callable[[], bytes]
    picture: NDArray[np.uint8] = field(default_factory=lambda: LEFT_RIGHT)  # (32, 32, 3) RGB
    code: str = ""  # of the error; empty: a picture
    status: int = 200
    says: str = ""  # in the error's message


def tiff(orientation: int | None, *, is_big: bool = False, is_long: bool = False) -> bytes:
    """Return Exif's TIFF structure with this orientation, or with none."""
    order = ">" if is_big else "<"
    head = (b"MM" if is_big else b"II") + struct.pack(order + "HI", 42, 8)
    if orientation is None:
        return head + struct.pack(order + "HI", 0, 0)
    value = struct.pack(order + ("I" if is_long else "H"), orientation).ljust(4, b"\0")
    return head + struct.pack(order + "HHHI", 1, 0x0112, 4 if is_long else 3, 1) + value + bytes(4)


def jpeg_with(*bodies: bytes) -> bytes:
    """Return the JPEG with these APP1 segments at its start."""
    data = encode(LEFT_RIGHT, "JPEG", quality=100, subsampling=0)
    segments = [b"\xff\xe1" + struct.pack(">H", len(body) + 2) + body for body in bodies]
    return data[:2] + b"".join(segments) + data[2:]


def png_with(before: bytes = b"", after: bytes = b"") -> bytes:
    """Return the PNG with further chunks before and after its pixels."""
    return make_png(SIDE, SIDE, 8, 2, before, png_chunk(b"IDAT", png_rows()), after)


def png_rows() -> bytes:
    return zlib.compress(b"".join(b"\0" + row.tobytes() for row in LEFT_RIGHT))


def extended_webp(flags: int, *chunks: tuple[bytes, bytes]) -> bytes:
    """Return a WebP with VP8X's flags, which may be wrong, and these chunks."""
    canvas = (SIDE - 1).to_bytes(3, "little") * 2
    body = b"WEBP"
    for kind, content in ((b"VP8X", bytes([flags, 0, 0, 0]) + canvas), *chunks):
        body += kind + struct.pack("<I", len(content)) + content + b"\0" * (len(content) % 2)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def webp_chunk(data: bytes, kind: bytes) -> tuple[bytes, bytes]:
    at = data.index(kind, 12)
    (length,) = struct.unpack_from("<I", data, at + 4)
    return kind, data[at + 8 : at + 8 + length]


def webp_with_exif_twice() -> bytes:
    pixels = webp_chunk(encode(LEFT_RIGHT, "WEBP", lossless=True), b"VP8L")
    return extended_webp(0x08, pixels, (b"EXIF", EXIF + EXIF + tiff(6)))


def webp_without_alpha_flag(kind: bytes) -> bytes:
    """Return a transparent WebP whose VP8X does not say so: lossless (VP8L), or lossy (ALPH)."""
    clear = Image.fromarray(LEFT_RIGHT)
    clear.putalpha(0)
    is_lossless = kind == b"VP8L"
    data = encode(clear, "WEBP", lossless=is_lossless, quality=100, exact=True)
    kinds = (b"VP8L",) if is_lossless else (b"ALPH", b"VP8 ")
    return extended_webp(0, *(webp_chunk(data, each) for each in kinds))


def apng(num_frames: int) -> bytes:
    """Return an animation of red frames whose default picture, grey, is none of its frames."""
    rows = [zlib.compress((b"\0" + bytes(colour) * 16) * 16) for colour in (GRAY, (200, 0, 0))]
    control = struct.pack(">IIIIIHHBB", 0, 16, 16, 0, 0, 1, 10, 0, 0)
    chunks = [png_chunk(b"acTL", struct.pack(">II", num_frames, 0)), png_chunk(b"IDAT", rows[0])]
    for number in range(num_frames):
        chunks.append(png_chunk(b"fcTL", struct.pack(">I", 2 * number) + control[4:]))
        chunks.append(png_chunk(b"fdAT", struct.pack(">I", 2 * number + 1) + rows[1]))
    return make_png(16, 16, 8, 2, *chunks)


def damaged_apng() -> bytes:
    """Return an animation whose first frame holds a row filter that there is not."""
    data = apng(2)
    rows = zlib.compress(b"\x77" * (1 + 16 * 3) * 16)
    frame = data.index(b"fdAT") - 4
    (length,) = struct.unpack_from(">I", data, frame)
    chunk = png_chunk(b"fdAT", data[frame + 8 : frame + 12] + rows)
    return data[:frame] + chunk + data[frame + 12 + length :]


def cgbi() -> bytes:
    data = png_with()
    return data[:8] + png_chunk(b"CgBI", b"\x50\0\x20\x06") + data[8:]


def iend_without_checksum() -> bytes:
    return png_with()[:-4] + bytes(4)


def two_components() -> bytes:
    """Return a JPEG that announces two components: frame and scan lack the third."""
    data = encode(LEFT_RIGHT, "JPEG", subsampling=0)
    frame, scan = data.index(b"\xff\xc0"), data.index(b"\xff\xda")
    shorter_frame = b"\xff\xc0\0\x0e" + data[frame + 4 : frame + 9] + b"\2"
    shorter_frame += data[frame + 10 : frame + 16]
    shorter_scan = b"\xff\xda\0\x0a\2" + data[scan + 5 : scan + 9]
    return data[:frame] + shorter_frame + data[frame + 19 : scan] + shorter_scan + data[scan + 11 :]


def tga() -> bytes:
    return encode(LEFT_RIGHT, "TGA")


def cut_then_whole() -> bytes:
    data = jpeg_with()
    return data[: len(data) - 60] + data


NOT_DECODED: dict[str, Any] = {"code": "unsupported_format", "status": 415}
LARGE = bytes(8_000_001)

CASES = [
    Case("two_exif_6_1.jpg", partial(jpeg_with, EXIF + tiff(6), EXIF + tiff(1)), ABOVE_BELOW),
    Case("two_exif_6_none.jpg", partial(jpeg_with, EXIF + tiff(6), EXIF + tiff(None)), ABOVE_BELOW),
    Case("exif_6_then_bare_exif.jpg", partial(jpeg_with, EXIF + tiff(6), EXIF), ABOVE_BELOW),
    Case("two_exif_1_6.jpg", partial(jpeg_with, EXIF + tiff(1), EXIF + tiff(6))),
    Case("two_exif_none_6.jpg", partial(jpeg_with, EXIF + tiff(None), EXIF + tiff(6))),
    Case(
        "long_big_endian.jpg",
        partial(jpeg_with, EXIF + tiff(6, is_big=True, is_long=True)),
        ABOVE_BELOW,
    ),
    Case("exif_prefix_twice.jpg", partial(jpeg_with, EXIF + EXIF + tiff(6)), ABOVE_BELOW),
    Case("exif_prefix_twice.webp", webp_with_exif_twice, ABOVE_BELOW),
    Case("exif_prefix.png", partial(png_with, png_chunk(b"eXIf", EXIF + tiff(6))), ABOVE_BELOW),
    # Browsers and the PNG specification look for it before the pixels only: decision 0005.
    Case("exif_after_idat.png", partial(png_with, after=png_chunk(b"eXIf", tiff(6)))),
    Case("vp8l_alpha_flag_unset.webp", partial(webp_without_alpha_flag, b"VP8L"), PLAIN_WHITE),
    Case("alph_flag_unset.webp", partial(webp_without_alpha_flag, b"ALPH")),
    Case("apng_default_hidden_2.png", partial(apng, 2), PLAIN_GRAY),
    Case("apng_num_frames_0.png", partial(apng, 0), PLAIN_GRAY),
    Case("cgbi.png", cgbi, **NOT_DECODED, says="Xcode's PNG"),
    Case("two_components.jpg", two_components, **NOT_DECODED, says="2 components"),
    Case("tga.jpg", tga, **NOT_DECODED, says="^TGA is not decoded"),
    Case("iend_crc.png", iend_without_checksum),
    Case(
        "cut_then_another.jpg", cut_then_whole, code="corrupt_image", status=400, says="truncated"
    ),
]
FURTHER = [  # that no stored file shows
    Case("large_itxt.png", partial(png_with, png_chunk(b"iTXt", b"a\0\0\0\0\0" + LARGE))),
    Case("large_exif.png", partial(png_with, png_chunk(b"eXIf", tiff(6) + LARGE)), ABOVE_BELOW),
    Case("large_cabx.png", partial(png_with, png_chunk(b"caBX", LARGE))),
    Case("apng_damaged_frame.png", damaged_apng, PLAIN_GRAY),  # OpenCV 5 crashes at it
]
