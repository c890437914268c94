"""What may be given as an image, and the bytes that are sent for it."""

from pathlib import Path

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from models.image import ImageRule, read_image
from tandem_client import BadImage
from tandem_client.images import encode_png, encoded, images_of

PIXELS = arrays(np.uint8, st.tuples(st.integers(1, 9), st.integers(1, 9), st.just(3)))


@given(PIXELS)
def test_png_keeps_every_pixel(rgb):
    decoded = cv2.imdecode(np.frombuffer(encode_png(rgb), np.uint8), cv2.IMREAD_COLOR)
    assert decoded is not None
    np.testing.assert_array_equal(decoded[..., ::-1], rgb)


@pytest.mark.parametrize("channels", ["rgb", "bgr"])
def test_the_service_reads_the_array_in_the_order_that_was_said(channels):
    bgr = np.random.default_rng(7).integers(0, 256, (16, 16, 3), np.uint8)
    given_as = bgr if channels == "bgr" else bgr[..., ::-1]
    read = read_image(encoded(given_as, channels), ImageRule(16, 16))
    np.testing.assert_array_equal(read, bgr)


@pytest.mark.parametrize("channels", [None, "RGB", "grey"])
def test_a_view_is_sent_as_it_looks_and_the_order_of_channels_is_not_guessed(channels):
    view = np.random.default_rng(7).integers(0, 256, (20, 30, 3), np.uint8)[::2, 5:25:2]
    assert encoded(view, "rgb") == encoded(np.ascontiguousarray(view), "rgb")
    with pytest.raises(ValueError, match=r"'rgb'.*or 'bgr'"):
        encoded(view, channels)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        *((np.float32, (2, 2, 3)), (np.int8, (2, 2, 3)), (np.uint8, (2, 2)), (np.uint8, (2, 2, 4))),
        *((np.uint8, shape) for shape in ((3, 2, 2), (1, 2, 2, 3), (0, 2, 3), (2, 0, 3), ())),
    ],
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
