"""HEIC and AVIF: as their libraries show them, within the limits; and images in a local S3."""

import io
import re
import struct
import sys

import boto3
import numpy as np
import pillow_heif
import pytest
from PIL import Image

from models import image_files
from models.errors import CorruptImageError, StoreError, TooManyPixelsError, UnsupportedFormatError
from models.image import DEFAULT_MAX_FULL_PIXELS, ImageRule, check_image, read_image
from models.image_files import images_at, is_store, opened_store
from models.image_header import read_header
from models.machine import MissingExtraError
from tests.support import images
from tests.support.cases import cases
from tests.support.object_stores import local_s3

KINDS = ("HEIC", "AVIF")
RULE, ORIENTATION = ImageRule(48, 64), 0x0112
CLOSE = 4  # levels of 255, of compression; a wrong colour, side or place differs by tens
KEYS = ("in/b.jpg", "in/a #1%.PNG", "in/deep/c.webp", "in/readme.txt", "in/.hidden/d.jpg", "e.jpg")


def make(kind: str, image, **options: object) -> bytes:
    picture = image if isinstance(image, Image.Image) else Image.fromarray(image)
    if kind == "AVIF":
        return images.encode(picture, "AVIF", quality=95, subsampling="4:4:4", speed=10, **options)
    buffer = io.BytesIO()
    pillow_heif.from_pillow(picture).save(buffer, quality=95, chroma=444, **options)
    return buffer.getvalue()


def replaced(data: bytes, kind: bytes, offset: int, value: bytes) -> bytes:
    """The file with other bytes so far behind the name of its first box of this kind."""
    at = data.index(kind) + len(kind) + offset
    return data[:at] + value + data[at + len(value) :]


def announcing(data: bytes, width: int, height: int) -> bytes:
    """The file with another size in its first ``ispe``; the picture in it stays."""
    return replaced(data, b"ispe", 4, struct.pack(">II", width, height))


def with_exif(kind: str, scene, tag: int, value: int) -> bytes:
    exif = Image.Exif()
    exif[tag] = value
    if kind == "AVIF":
        return make("AVIF", scene, exif=exif)
    picture = Image.fromarray(scene)
    picture.info["exif"] = exif.tobytes()
    return make("HEIC", picture)


def is_close(data: bytes, scene) -> bool:
    return (
        images.difference(
            read_image(data, RULE), images.reference(images.encode(scene, "PNG"), RULE)
        )[1]
        < CLOSE
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(200, 150), (151, 203)])
def test_pixels_are_those_of_the_scene_but_for_compression(kind, size):
    scene = images.make_scene(*size)
    header = read_header(data := make(kind, scene))
    assert (header.format, header.width, header.height) == (kind.lower(), *size)
    assert (header.orientation, header.has_alpha) == (1, False)
    assert is_close(data, scene)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_avif_is_turned_once(orientation):  # Pillow writes it as irot and imir
    scene = images.make_scene(120, 90)
    upright = images.as_pillow_reads(images.with_orientation(scene, "PNG", orientation))
    assert is_close(with_exif("AVIF", scene, ORIENTATION, orientation), np.asarray(upright))


@pytest.mark.parametrize("value", range(4))
def test_a_heic_is_turned_and_mirrored_once(value):
    """irot is quarter turns to the left, imir an axis; libheif follows them."""
    scene = images.make_scene(120, 90)
    data = with_exif("HEIC", scene, ORIENTATION, 3)  # stored upside down, with irot
    data = replaced(data, b"irot", 0, bytes([value]))
    assert read_header(data).orientation == 1
    assert is_close(data, np.rot90(np.rot90(scene, 2), value))
    data = with_exif("HEIC", scene, ORIENTATION, 2)  # stored with left and right swapped
    data = replaced(data, b"imir", 0, bytes([value % 2]))
    assert is_close(data, np.flip(np.flip(scene, 1), value % 2))


@pytest.mark.parametrize("kind", KINDS)
def test_exif_alone_turns_nothing(kind):
    scene = images.make_scene(120, 90)
    data = with_exif(kind, scene, ORIENTATION + 1, 3)
    turned = data.replace(b"\x01\x13\x00\x03", b"\x01\x12\x00\x03")  # now "orientation"
    assert turned != data
    assert is_close(turned, scene)


@pytest.mark.parametrize("kind", KINDS)
def test_transparency_is_laid_over_white_and_pictures_may_be_grey(kind):
    scene = Image.fromarray(images.make_scene(120, 90))
    assert is_close(make(kind, grey := scene.convert("L")), grey)
    scene.putalpha(Image.fromarray(images.make_alpha(120, 90)))
    data = make(kind, scene)
    assert read_header(data).has_alpha
    assert is_close(data, scene)


def test_more_bits_become_eight_and_a_picture_may_be_in_tiles_as_phones_make_it():
    scene = images.make_scene(300, 200)
    buffer = io.BytesIO()
    samples = (scene.astype(np.uint16) << 8).tobytes()
    pillow_heif.from_bytes("RGB;16", (300, 200), samples).save(buffer, quality=95, chroma=444)
    tiled = make("HEIC", scene, tile_size=128)
    assert b"grid" in tiled
    assert is_close(buffer.getvalue(), scene)
    assert is_close(tiled, scene)


def test_of_several_pictures_the_primary_one_is_taken():
    file = pillow_heif.from_pillow(Image.fromarray(images.make_scene(120, 90)))
    second = images.make_scene(90, 120, seed=3)
    file.add_from_pillow(Image.fromarray(second))
    buffer = io.BytesIO()
    file.save(buffer, quality=95, chroma=444, primary_index=1)
    assert is_close(buffer.getvalue(), second)


def test_of_an_animation_the_first_picture_is_taken_and_too_many_are_refused(monkeypatch):
    scenes = [Image.fromarray(images.make_scene(64, 48, seed=seed)) for seed in range(3)]
    data = make("AVIF", scenes[0], save_all=True, append_images=scenes[1:])
    assert is_close(data, scenes[0])
    monkeypatch.setattr(image_files, "_MAX_PICTURES", 2)
    with pytest.raises(UnsupportedFormatError, match=r"AVIF with 3 pictures.*up to 2 are"):
        read_header(data)


@pytest.mark.parametrize("brand", [b"mif1", b"msf1"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_general_brand_is_what_it_is_compatible_with(kind, brand):
    data = make(kind, images.make_scene(64, 48))
    assert read_header(data[:8] + brand + data[12:]).format == kind.lower()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(65_535, 65_535), (2**31, 3), (20_000, 20_000), (8000, 4000)])
def test_a_huge_announced_size_is_refused_before_decoding(kind, size, monkeypatch):
    monkeypatch.setattr("models.image.decode_heif", lambda *_: pytest.fail("it was decoded"))
    # 151 x 203: of odd sides HEIC says by clap that less is shown; what is stored counts.
    for scene in (images.make_scene(128, 128), images.make_scene(151, 203)):
        data = announcing(make(kind, scene), *size)
        with pytest.raises(TooManyPixelsError, match=f"{size[0]} x {size[1]}"):
            check_image(data, RULE, max_pixels=2**25, max_full_pixels=DEFAULT_MAX_FULL_PIXELS)


@pytest.mark.parametrize("size", [(16, 16), (500, 20), (2000, 2000)])
def test_a_heic_of_another_size_than_announced_is_corrupt(size):
    data = announcing(make("HEIC", images.make_scene(128, 128)), *size)
    with pytest.raises(CorruptImageError, match="HEIC"):
        read_image(data, RULE)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_cut_anywhere_is_corrupt(kind):
    data = make(kind, images.make_scene(64, 48))
    for kept in [*range(12, len(data), 29), len(data) - 1]:
        with pytest.raises(CorruptImageError):
            read_image(data[:kept], RULE)


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_give_a_picture_or_a_refusal(kind):
    rng = np.random.default_rng(5)
    whole = np.frombuffer(make(kind, images.make_scene(64, 48)), np.uint8)
    num_refused = 0
    for _ in range(300):
        damaged = whole.copy()
        damaged[rng.integers(12, min(500, len(whole)), 3)] = rng.integers(0, 256, 3)
        try:
            assert read_image(damaged.tobytes(), RULE).shape == RULE.shape
        except (CorruptImageError, TooManyPixelsError, UnsupportedFormatError):
            num_refused += 1
    assert num_refused > 50


def test_boxes_that_are_very_many_are_not_walked():
    start = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"
    for rest in (b"\0\0\0\x08free" * 500_000, b"\0\0\0\0meta" + b"ispe" + bytes(4) * 500_000):
        with pytest.raises(CorruptImageError, match="header is cut short or damaged"):
            read_header(start + rest)


@pytest.fixture(scope="module")
def bucket():
    with pytest.MonkeyPatch.context() as patch, local_s3(patch) as url:
        for key in (*KEYS, "docs/a.md"):
            boto3.client("s3").put_object(Bucket=url.removeprefix("s3://"), Key=key, Body=key)
        yield url


@pytest.mark.parametrize("end", ["", "/"])
def test_images_below_a_folder_of_a_whole_bucket_and_one_object(bucket: str, end: str) -> None:
    names = ("a #1%.PNG", "b.jpg", "deep/c.webp")
    assert images_at(f"{bucket}/in{end}") == [f"{bucket}/in/{name}" for name in names]
    assert f"{bucket}/e.jpg" in images_at(bucket)
    assert images_at(f"{bucket}/in/readme.txt") == [f"{bucket}/in/readme.txt"]
    assert image_files.read_image(f"{bucket}/in/a #1%.PNG") == b"in/a #1%.PNG"
    with pytest.raises(OSError, match="in/none"):
        image_files.read_image(f"{bucket}/in/none")


@cases(
    "place, says",
    ("BUCKET/in/none", "cannot list .*in/none"),
    ("BUCKET/docs", f"no {image_files.KINDS} in"),
    ("s3://absent-bucket/in", "cannot list s3://absent-bucket/in"),
    ("ftp://host/in", r"cannot open ftp://host/in: .*write s3://BUCKET/FOLDER"),
)
def test_nothing_there(bucket: str, place: str, says: str) -> None:
    with pytest.raises(StoreError, match=says):
        images_at(re.sub("^BUCKET", bucket, place))


def test_a_path_is_no_store_and_a_store_needs_pyarrow(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [is_store(place) for place in ("photos/in", "s3://bucket/in")] == [False, True]
    monkeypatch.setitem(sys.modules, "pyarrow.fs", None)
    with pytest.raises(MissingExtraError, match=r"needs pyarrow.*tandem-serve\[parquet\]"):
        opened_store("s3://bucket/in")
