"""What may be given as an image, and the bytes that are sent for it."""

import io
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image, ImageCms

from models.image import ImageRule, read_image
from tandem_client import BadImage
from tandem_client.images import ShrunkFile, encode_png, encoded, images_of, shorter_side, shrunk
from tests.support.cases import cases

PIXELS = arrays(np.uint8, st.tuples(st.integers(1, 9), st.integers(1, 9), st.just(3)))
RULE = ImageRule(28, 32)  # as the service reads: shrunk files have twice its side
SHORTER = 64


@given(PIXELS)
def test_png_keeps_every_pixel(rgb):
    decoded = cv2.imdecode(np.frombuffer(encode_png(rgb), np.uint8), cv2.IMREAD_COLOR)
    assert decoded is not None
    np.testing.assert_array_equal(decoded[..., ::-1], rgb)


@pytest.mark.parametrize("channels", ["rgb", "bgr"])
def test_the_service_reads_the_array_in_the_order_that_was_said(channels):
    bgr = np.random.default_rng(7).integers(0, 256, (16, 16, 3), np.uint8)
    given_as = bgr if channels == "bgr" else bgr[..., ::-1]
    np.testing.assert_array_equal(read_image(encoded(given_as, channels), ImageRule(16, 16)), bgr)


@pytest.mark.parametrize("channels", [None, "rgb", "bgr"])
@pytest.mark.parametrize("shape", [(16, 16), (16, 16, 1)])
def test_a_grey_array_needs_no_order(channels, shape):
    grey = np.random.default_rng(7).integers(0, 256, shape, np.uint8)
    found = read_image(encoded(grey, channels), ImageRule(16, 16))
    np.testing.assert_array_equal(found, np.dstack([grey] * 3))


@pytest.mark.parametrize("channels", [None, "RGB", "grey"])
def test_a_view_is_sent_as_it_looks_and_the_order_of_channels_is_not_guessed(channels):
    view = np.random.default_rng(7).integers(0, 256, (20, 30, 3), np.uint8)[::2, 5:25:2]
    assert encoded(view, "rgb") == encoded(np.ascontiguousarray(view), "rgb")
    with pytest.raises(ValueError, match=r"'rgb'.*or 'bgr'"):
        encoded(view, channels)


@cases(
    "kind, shape",
    *((np.float32, (2, 2, 3)), (np.int8, (2, 2, 3)), (np.uint8, (2,)), (np.uint8, (2, 2, 4))),
    *((np.uint8, shape) for shape in ((3, 2, 2), (1, 2, 2, 3), (0, 2, 3), (2, 0, 3), ())),
)
def test_an_array_of_another_kind_is_named(kind, shape):
    with pytest.raises(BadImage, match=r"uint8 \(height, width, 3\)") as caught:
        encoded(np.zeros(shape, kind)[()], "rgb")  # a scalar where there is no axis
    assert caught.value.code == "bad_array"
    assert str(shape) in caught.value.message


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_bytes_are_sent_as_they_are(kind):
    assert encoded(kind(b"photo"), None) == b"photo"


def test_a_path_is_read(tmp_path):
    (tmp_path / "photo.jpg").write_bytes(b"photo")
    for kind in (str, Path):
        assert encoded(kind(tmp_path / "photo.jpg"), None) == b"photo"
    for name in ("nowhere.jpg", "", "nul\0.jpg"):
        with pytest.raises(BadImage, match="cannot read the file") as caught:
            encoded(f"{tmp_path}/{name}", None)
        assert caught.value.code == "unreadable"


@pytest.mark.parametrize("thing", [None, 3, 1.5, object(), iter([])])
def test_what_is_no_image_at_all(thing):
    with pytest.raises(TypeError, match="a path, a file's bytes, or a NumPy array"):
        encoded(thing, None)


def test_several_are_a_sequence():
    array = np.zeros((2, 2, 3), np.uint8)
    for one in ("photo.jpg", Path("photo.jpg"), b"x", bytearray(b"x"), memoryview(b"x"), array):
        assert images_of(one) == ([one], False)
    for many in (["a", b"b"], ("a",), [array]):
        assert images_of(many) == (many, True)  # type: ignore[arg-type]


def picture(mode: str = "RGB", size: tuple[int, int] = (400, 300)) -> Image.Image:
    """Return a smooth picture whose corners differ; alpha falls from left to right."""
    width, height = size
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    rgba = Image.fromarray(np.stack([x, y, 255 - (x + y) / 2, 255 - x], axis=-1).astype(np.uint8))
    return rgba if mode == "RGBA" else rgba.convert("RGB").convert(mode)


def saved(of: Image.Image, kind: str = "JPEG", **options) -> bytes:
    file = io.BytesIO()
    of.save(file, kind, **options)
    return file.getvalue()


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


def exif_of(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = orientation, "a description"
    return exif


def check_reads_alike(before: bytes, after: bytes) -> None:
    """The service makes nearly the same input of both files."""
    pixels = [read_image(data, RULE).astype(int) for data in (before, after)]
    assert np.abs(pixels[0] - pixels[1]).mean() < 2


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_a_shrunk_file_is_seen_upright(kind, orientation):
    whole = saved(picture(), kind, exif=exif_of(orientation))
    data, before = shrunk(whole, None, SHORTER)
    assert before == (400, 300)
    assert opened(data).size == (85, 64)
    assert dict(opened(data).getexif()) == {0x0112: orientation}  # without a place or a description
    check_reads_alike(whole, data)


@cases(
    "mode, kind",
    *(("RGB", kind) for kind in ("JPEG", "PNG", "WEBP")),
    *(("L", "JPEG"), ("CMYK", "JPEG"), ("P", "PNG"), ("1", "PNG"), ("LA", "PNG")),
    *(("RGBA", "PNG"), ("RGBA", "WEBP")),
)
def test_colours_stay_the_same_and_transparency_is_white(mode, kind):
    whole = saved(picture(mode), kind)
    data, before = shrunk(whole, None, SHORTER)
    assert before == (400, 300)
    assert (opened(data).format, opened(data).size) == ("JPEG", (85, 64))
    check_reads_alike(whole, data)


def test_the_colour_profile_is_kept_where_the_colours_are_of_its_kind():
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    for mode, kept in (("RGB", profile), ("CMYK", None)):
        data, _ = shrunk(saved(picture(mode), icc_profile=profile), None, SHORTER)
        assert opened(data).info.get("icc_profile") == kept


def animation() -> bytes:
    return saved(picture(), "GIF", save_all=True, append_images=[picture("L")])


@cases(
    "whole",
    saved(picture(size=(64, 300))),  # its shorter side is as asked
    saved(picture(size=(20, 30)), "PNG"),
    saved(picture(size=(70, 70)), quality=1),  # fewer bytes as it is
    saved(Image.fromarray(np.full((300, 400), 40_000, np.uint16)), "PNG"),  # 16 bits
    saved(picture())[:2000],
    saved(picture(), "PNG")[:2000],
    saved(picture(), "PNG").replace(b"IDAT", b"IDAX"),
    saved(picture(size=(600, 65_000)))[:200],
    *(animation(), saved(picture(), "BMP"), b"", b"no image"),
    ids=range(12),
)
def test_a_file_that_is_small_or_cannot_be_read_is_sent_as_it_is(whole):
    assert shrunk(whole, None, SHORTER) == ShrunkFile(whole)


def test_a_result_that_no_jpeg_can_hold_is_sent_as_it_is():
    whole = saved(Image.new("L", (80, 100_000)), "PNG")  # 64 x 80,000; JPEG ends at 65,535
    assert shrunk(whole, None, SHORTER) == ShrunkFile(whole)


@pytest.mark.parametrize("channels", ["rgb", "bgr"])
def test_an_array_is_shrunk_to_a_jpeg_and_a_small_one_keeps_every_pixel(channels):
    rgb = np.asarray(picture())
    array = rgb if channels == "rgb" else rgb[..., ::-1]
    data, before = shrunk(array, channels, SHORTER)
    assert (opened(data).format, before) == ("JPEG", (400, 300))
    check_reads_alike(encode_png(rgb), data)
    assert shrunk(array, channels, 300) == ShrunkFile(encoded(array, channels))
    with pytest.raises(BadImage, match=r"uint8 \(height, width, 3\)"):
        shrunk(array[..., :2], channels, SHORTER)


def test_without_pillow_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r"pip install 'tandem-serve-client\[images\]'"):
        shrunk(b"photo", None, SHORTER)


@cases(
    "served, shorter",
    ({"input_size": 224, "resize_shorter": 232}, 464),
    ({"input_size": 224}, 448),  # of a service before resize_shorter
    *(({}, 512), (None, 512), ([], 512), ({"input_size": "x"}, 512), ({"input_size": 0}, 512)),
)
def test_the_side_is_twice_that_of_the_service(served, shorter):
    assert shorter_side(served) == shorter
