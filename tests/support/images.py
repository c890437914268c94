"""Makes pictures and image files by code, and the reference that the product is held to."""

import io
import struct
import zlib

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from models.image import ImageRule

RGB = NDArray[np.uint8]


def make_scene(width: int, height: int, seed: int = 0) -> RGB:
    """(height, width, 3) uint8 RGB: gradients, hard-edged shapes and noise; no symmetry."""
    y, x = np.mgrid[0:height, 0:width]
    red, green = 255 * x / max(width - 1, 1), 255 * y / max(height - 1, 1)
    scene = np.stack([red, green, 255 - red], axis=-1)
    disc = (x - 0.4 * width) ** 2 + (y - 0.55 * height) ** 2 < (0.3 * min(width, height)) ** 2
    scene[disc] = (20, 200, 90)
    scene[(x // 3 + y // 5) % 7 == 0] *= 0.4
    noise = np.random.default_rng(seed).normal(0, 12, scene.shape)
    return np.clip(scene + noise, 0, 255).astype(np.uint8)


def make_alpha(width: int, height: int) -> NDArray[np.uint8]:
    """(height, width) uint8: from transparent at the left to opaque at the right, with a hole."""
    alpha = np.tile(np.linspace(0, 255, width).astype(np.uint8), (height, 1))
    alpha[height // 3 : height // 2, width // 2 :] = 0
    return alpha


def encode(image: Image.Image | NDArray[np.uint8], kind: str, **options: object) -> bytes:
    """File of a Pillow image, or of an (h, w), (h, w, 3) RGB or (h, w, 4) RGBA array."""
    picture = image if isinstance(image, Image.Image) else Image.fromarray(image)
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def with_orientation(image: RGB, kind: str, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encode(image, kind, exif=exif, **({"quality": 95} if kind == "JPEG" else {}))


def png_chunk(kind: bytes, body: bytes) -> bytes:
    checksum = zlib.crc32(kind + body)
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", checksum)


def make_png(width: int, height: int, depth: int, colour_type: int, *chunks: bytes) -> bytes:
    """A PNG of any announced size; ``chunks`` follow its header."""
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour_type, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + png_chunk(b"IEND", b"")


def make_gray_png(samples: NDArray[np.integer], depth: int, transparent: int) -> bytes:
    """Greyscale of 1, 2, 4, 8 or 16 bits with one transparent level (Pillow cannot write all)."""
    if depth == 16:
        rows = [row.astype(">u2").tobytes() for row in samples]
    else:
        bits = np.unpackbits(samples.astype(np.uint8)[..., None], axis=-1)[..., 8 - depth :]
        rows = [np.packbits(row.reshape(-1)).tobytes() for row in bits]
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows))
    height, width = samples.shape
    level = png_chunk(b"tRNS", struct.pack(">H", transparent))
    return make_png(width, height, depth, 0, level, png_chunk(b"IDAT", pixels))


def as_pillow_reads(data: bytes) -> Image.Image:
    """Upright RGB, transparency over white."""
    picture = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
    return picture.convert("RGB")


def reference_crop(picture: Image.Image, rule: ImageRule) -> RGB:
    """torchvision's ImageClassification preset by Pillow, as (H, W, 3) uint8 BGR."""
    width, height = picture.size
    shorter, (rows, columns, _) = rule.resize_shorter, rule.shape
    if rule.resize == "stretch":
        resized = columns, rows
    elif width <= height:
        resized = shorter, int(shorter * height / width)
    else:
        resized = int(shorter * width / height), shorter
    picture = picture.resize(resized, Image.Resampling[rule.interpolation.upper()])
    # As torchvision's center_crop: black borders first, where the picture is smaller.
    before = [max(0, (side - own) // 2) for side, own in zip((columns, rows), resized, strict=True)]
    padded = [max(side, own) for side, own in zip((columns, rows), resized, strict=True)]
    bordered = Image.new("RGB", (padded[0], padded[1]))
    bordered.paste(picture, (before[0], before[1]))
    left, top = round((padded[0] - columns) / 2.0), round((padded[1] - rows) / 2.0)
    return np.asarray(bordered.crop((left, top, left + columns, top + rows)))[..., ::-1]


def reference(data: bytes, rule: ImageRule) -> RGB:
    return reference_crop(as_pillow_reads(data), rule)


def difference(ours: RGB, theirs: RGB) -> tuple[int, float]:
    """Largest and mean absolute difference, in levels of 255."""
    apart = np.abs(ours.astype(int) - theirs.astype(int))
    return int(apart.max()), float(apart.mean())
