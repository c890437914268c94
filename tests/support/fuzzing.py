"""Fuzzes manifests and image files: a right answer or a clear error, never a traceback.

``tests/unit/models/test_fuzz.py`` tries a few thousand mutations of each. The same seed gives the
same mutations.
"""

import struct
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import yaml
from PIL import Image

from calibration.commands.models import set_as_json
from calibration.sets.transaction import write_manifest
from models.errors import ImageError, ModelSetError
from models.image import ImageRule, read_image
from models.image_header import read_header
from models.ledger import judge
from models.manifest import MANIFEST_NAME, Manifest, read_manifest
from tests.support.image_cases import CASES, EXIF, jpeg_with, png_with, tiff
from tests.support.images import encode, make_alpha, make_scene, png_chunk
from tests.support.mutations import spoilt_bytes, spoilt_tree
from tests.support.tiny_networks import with_accuracy, write_tiny_set

Outcome = str  # "taken", or the error's code
Attempt = Callable[[Random], Outcome]

MAX_S = 2.0  # CPU time of an attempt: nothing hangs
RULE = ImageRule(input_size=28, resize_shorter=32)
MAX_PIXELS = 1_000_000  # a flipped bit of a header must not cost gigabytes
HEADER_BYTES = 700
TEXTS = [
    b"true", b"~", b"1e308", b".nan", b"-.inf", b"2026-13-21", b"9" * 5000, b"[" * 2000,
    b"{" * 2000, b"- " * 2000, b"&a ", b"*a", b"<<: ", b"!!python/object:os.system ", b"!!int ",
    b"!!timestamp ", b"!!binary ", b"!!set ", b"? ", b": ", b"\n", b"\t", b"\0", b"\xff",
    "\u2028\ufeff".encode(), b"'", b'"', b"|\n", b">-\n", b"%YAML 9.9\n---\n", b"---\n", b"# ",
]  # fmt: skip
VALUES: list[Any] = [
    True, False, None, 0, -1, 1, 10**400, 2**63, 1e308, 5e-324, -0.0, float("nan"), float("inf"),
    "", "true", "../x", "/etc/passwd", "a" * 5000, "\0", "\u2028", [], {}, [[]], {"a": {"b": []}},
    "ensemble", "INT8", "multi_label", "2026-01-01", "0" * 64,
]  # fmt: skip
MARKERS = [
    b"\xff\xd8", b"\xff\xd9", b"\xff\xda", b"\xff\xc0", b"\xff\xe1", EXIF, b"\xff" * 40, bytes(40),
    b"IHDR", b"IDAT", b"IEND", b"tRNS", b"PLTE", b"acTL", b"eXIf", b"CgBI", b"VP8X", b"VP8L",
    b"ALPH", b"ANMF", b"EXIF", b"\x7f\xff\xff\xff", b"\x80\0\0\0", struct.pack(">H", 0x0112),
]  # fmt: skip


def run(attempt: Attempt, num: int, seed: int) -> Counter[Outcome]:
    """Try ``num`` mutations; count what became of them.

    Raises:
        AssertionError: one ended otherwise than with an answer or an error of ours; the message
            has the seed that makes it again.

    """
    outcomes: Counter[Outcome] = Counter()
    for number in range(num):
        started = time.process_time()
        try:
            outcomes[attempt(Random(f"{seed}/{number}"))] += 1
        except Exception as error:
            raise AssertionError(f'mutation Random("{seed}/{number}"): {error!r}') from error
        taken_s = time.process_time() - started
        assert taken_s < MAX_S, f'mutation Random("{seed}/{number}") took {taken_s:.1f} s'
    return outcomes


class ManifestFuzz:
    """Spoils a manifest's text, or what it says.

    Args:
        folder: where a set is made for it.

    """

    def __init__(self, folder: Path) -> None:
        self._folder = write_tiny_set(folder, gains={"sure": 8.0})
        write_manifest(folder, with_accuracy(read_manifest(folder), {"sure": 0.9}, {"sure": 0.001}))
        self._text = (folder / MANIFEST_NAME).read_bytes()
        self._tree = yaml.safe_load(self._text)

    def __call__(self, rng: Random) -> Outcome:
        if rng.random() < 0.5:
            text = spoilt_bytes(rng, self._text, TEXTS)
        else:
            tree = spoilt_tree(rng, self._tree, VALUES)
            text = yaml.dump(tree, Dumper=yaml.CDumper, allow_unicode=rng.random() < 0.5).encode()
        (self._folder / MANIFEST_NAME).write_bytes(text)
        try:
            manifest = read_manifest(self._folder)
        except ModelSetError as error:
            return self._refused(error)
        self._check(manifest)
        return "taken"

    def _refused(self, error: ModelSetError) -> Outcome:
        assert str(self._folder / MANIFEST_NAME) in error.message
        return error.code

    def _check(self, manifest: Manifest) -> None:
        """What was taken is in its ranges, can be used, and is read back as it is."""
        assert type(manifest.max_drop) is float
        assert 0 <= manifest.max_drop <= 1
        assert all(0 < member.weight <= 1e6 for member in manifest.members)
        assert judge(manifest).message
        assert set_as_json(manifest)["members"] == [member.name for member in manifest.members]
        write_manifest(self._folder, manifest)
        assert read_manifest(self._folder) == manifest


class ImageFuzz:
    """Spoils image files: mostly their headers."""

    def __init__(self) -> None:
        scene = make_scene(60, 45)
        clear = Image.fromarray(scene)
        clear.putalpha(Image.fromarray(make_alpha(60, 45)))
        self._files = [
            encode(scene, "JPEG", quality=60),
            encode(scene, "JPEG", quality=30, progressive=True),
            encode(clear, "PNG"),
            encode(Image.fromarray(scene).quantize(20), "PNG", transparency=2),
            encode(scene, "WEBP", quality=50),
            encode(clear, "WEBP", lossless=True),
            encode(clear, "WEBP", lossless=True, exif=EXIF + tiff(6)),
            *(case.make() for case in CASES),
        ]

    def __call__(self, rng: Random) -> Outcome:
        reach = HEADER_BYTES if rng.random() < 0.8 else None
        data = spoilt_bytes(rng, rng.choice(self._files), MARKERS, reach)
        try:
            pixels = read_image(data, RULE, max_pixels=MAX_PIXELS)
        except ImageError as error:
            return self._refused(error)
        assert (pixels.shape, pixels.dtype) == ((28, 28, 3), np.uint8)
        return "taken"

    @staticmethod
    def _refused(error: ImageError) -> Outcome:
        assert 400 <= error.status < 500
        assert error.message
        return error.code


class MetadataFuzz:
    """Spoils Exif metadata alone: the picture must stay, turned by one of the 8 orientations."""

    def __init__(self) -> None:
        self._pixels = {
            kind: {
                read_image(make(tiff(orientation)), RULE).tobytes() for orientation in range(1, 9)
            }
            for kind, make in self._makers().items()
        }

    def __call__(self, rng: Random) -> Outcome:
        kind, make = rng.choice(list(self._makers().items()))
        whole = tiff(rng.randint(1, 8), is_big=rng.random() < 0.5, is_long=rng.random() < 0.5)
        data = make(spoilt_bytes(rng, whole, MARKERS)[:60_000])
        assert read_image(data, RULE).tobytes() in self._pixels[kind]
        return f"orientation {read_header(data).orientation}"

    @staticmethod
    def _makers() -> dict[str, Callable[[bytes], bytes]]:
        return {
            "jpeg": lambda exif: jpeg_with(EXIF + exif),
            "png": lambda exif: png_with(png_chunk(b"eXIf", exif)),
            "other png chunks": lambda text: png_with(png_chunk(b"tEXt", text)),
        }
