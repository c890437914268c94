"""Whatever the bytes: the right shape, or an error that says what is wrong with the image."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from models.errors import ImageError
from models.image import ImageRule, read_image
from tests.support.images import encode, make_alpha, make_scene

RULE = ImageRule(input_size=28, resize_shorter=32)
MAX_PIXELS = 1_000_000  # a flipped bit in the header must not cost the test gigabytes
BOUNDED = settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)


def make_files() -> list[bytes]:
    scene = make_scene(60, 45)
    clear = Image.fromarray(scene)
    clear.putalpha(Image.fromarray(make_alpha(60, 45)))
    return [
        encode(scene, "JPEG", quality=60),
        encode(make_scene(300, 210), "JPEG", quality=30, progressive=True),
        encode(Image.fromarray(scene).convert("CMYK"), "JPEG"),
        encode(clear, "PNG"),
        encode(Image.fromarray(scene).quantize(20), "PNG", transparency=2),
        encode(scene, "WEBP", quality=50),
        encode(clear, "WEBP", lossless=True),
    ]


FILES = make_files()
STARTS = [b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", b"RIFF\xff\0\0\0WEBPVP8X"]


def is_picture_or_image_error(data: bytes) -> bool:
    try:
        pixels = read_image(data, RULE, max_pixels=MAX_PIXELS)
    except ImageError as error:
        return bool(error.message) and 400 <= error.status < 500
    return pixels.shape == (28, 28, 3) and pixels.dtype == np.uint8


@BOUNDED
@given(start=st.sampled_from(STARTS), rest=st.binary(max_size=300))
def test_arbitrary_bytes(start, rest):
    assert is_picture_or_image_error(start + rest)


@BOUNDED
@given(data=st.sampled_from(FILES), kept=st.floats(0, 1))
def test_truncated_files_never_give_a_picture(data, kept):
    cut = data[: int(kept * (len(data) - 1))]
    with pytest.raises(ImageError):
        read_image(cut, RULE, max_pixels=MAX_PIXELS)


@BOUNDED
@given(
    data=st.sampled_from(FILES),
    flips=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 7)), min_size=1, max_size=6),
    in_header=st.booleans(),
)
def test_flipped_bits(data, flips, in_header):
    damaged = bytearray(data)
    reach = min(len(data), 700) if in_header else len(data)
    for place, bit in flips:
        damaged[int(place * (reach - 1))] ^= 1 << bit
    assert is_picture_or_image_error(bytes(damaged))
