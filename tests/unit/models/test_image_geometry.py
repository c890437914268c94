"""Regions of a picture: what they may be, and that each is what its crop sent alone is."""

import io
import math
import re

import cv2
import numpy as np
import pytest
from PIL import Image

from models.errors import CorruptImageError, OutsidePictureError, TandemError, TooManyPixelsError
from models.image import ImageInputs, ImageRule
from models.image_geometry import MAX_REGIONS, PictureRegion, regions_of
from tests.support.cases import cases

WIDTH, HEIGHT = 300, 220
RULES = {
    "square": ImageRule(32, 36),
    "cubic": ImageRule(24, 24, resize="stretch", interpolation="bicubic"),
}
INPUTS = ImageInputs(RULES)
RNG = np.random.default_rng(7)
PIXELS = cv2.resize(RNG.integers(0, 256, (22, 30, 3), np.uint8), (WIDTH, HEIGHT))  # stored
ALPHA = cv2.resize(RNG.integers(0, 256, (22, 30, 1), np.uint8), (WIDTH, HEIGHT))
DEEP = (PIXELS.astype(np.uint16) << 8) | 77
SENT: list[list[float]] = [
    [0, 0, 1, 1],  # the whole
    [0.25, 0.5, 0.5, 0.5],
    [3, 7, 150, 101],
    [17, 0, 1, 200],  # a line
    [199, 180, 21, 40],  # to the edge, whichever side is longer
]


def edges(region: list[float], width: int, height: int) -> tuple[int, int, int, int]:
    x, y, w, h = region
    if max(region) > 1:
        return int(x), int(y), int(x + w), int(y + h)
    return round(x * width), round(y * height), round((x + w) * width), round((y + h) * height)


def jpeg(orientation: int) -> bytes:
    """The picture as a photograph that is shown turned."""
    file, exif = io.BytesIO(), Image.Exif()
    exif[0x112] = orientation
    Image.fromarray(PIXELS[:, :, ::-1]).save(file, "JPEG", quality=90, exif=exif)
    return file.getvalue()


def encoded(pixels: np.ndarray, suffix: str = ".png") -> bytes:
    return cv2.imencode(suffix, pixels)[1].tobytes()


def shown_of(data: bytes) -> np.ndarray:
    """Return a file's picture as OpenCV shows it, which turns it."""
    pixels = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    assert pixels is not None
    return pixels


def decoded(data: bytes, sent: list[list[float]]) -> list[np.ndarray]:
    parts = INPUTS.decode_regions(data, INPUTS.check(data, of_regions=True), regions_of(sent))
    images = [part for part in parts if not isinstance(part, TandemError)]
    assert len(images) == len(sent), parts
    return images


def check_crops(data: bytes, shown: np.ndarray) -> None:
    """Compare with crops of the picture as it is shown, each sent as a file of its own."""
    height, width = shown.shape[:2]
    for region, part in zip(SENT, decoded(data, SENT), strict=True):
        left, top, right, bottom = edges(region, width, height)
        alone = INPUTS.read(encoded(shown[top:bottom, left:right]))
        assert np.abs(part.astype(int) - alone).max() <= 1, region


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_region_is_what_its_crop_sent_alone_is_however_the_photograph_is_turned(orientation):
    data = jpeg(orientation)
    shown = shown_of(data)
    assert shown.shape[:2] == ((HEIGHT, WIDTH) if orientation < 5 else (WIDTH, HEIGHT))
    check_crops(data, shown)


@cases(
    "pixels, suffix",
    (PIXELS, ".png"),
    (np.dstack([PIXELS, ALPHA]), ".png"),
    (DEEP, ".png"),
    (PIXELS[..., 0], ".png"),
    (PIXELS, ".webp"),
    ids=["png", "transparent", "16 bits", "grey", "webp"],
)
def test_a_region_is_what_its_crop_sent_alone_is_in_every_format(pixels, suffix):
    data = encoded(pixels, suffix)
    check_crops(data, shown_of(data) if suffix == ".webp" else pixels)


def test_photographs_are_decoded_at_full_scale_within_the_limit_of_others():
    data = jpeg(1)
    assert INPUTS.check(data).reduction > 1
    with pytest.raises(TooManyPixelsError, match=r"full scale for its regions; then at most 65,99"):
        INPUTS.check(data, of_regions=True, max_full_pixels=WIDTH * HEIGHT - 1)
    with pytest.raises(CorruptImageError):
        INPUTS.check(data[:-500], of_regions=True)


@cases(
    "region, problem",
    ([250, 0, 51, 9], "[250, 0, 51, 9] reaches to x 301 and y 9; the picture has 300 x 220 pixels"),
    ([0, 219, 9, 2], "reaches to x 9 and y 221"),
    ([10**18, 10**18, 1, 1], "the picture has 300 x 220 pixels as it is shown"),
    ([0.5, 0.5, 0.0001, 0.5], "[0.5, 0.5, 0.0001, 0.5] has no pixel of 300 x 220"),
)
def test_a_region_outside_has_its_error_in_its_place(region, problem):
    data = encoded(PIXELS)
    sent = regions_of([[0, 0, 9, 9], region, [0, 0, 300, 220]])
    first, second, third = INPUTS.decode_regions(data, INPUTS.check(data, of_regions=True), sent)
    assert isinstance(second, OutsidePictureError)
    assert problem in second.message
    assert not isinstance(first, TandemError)
    assert not isinstance(third, TandemError)


@cases(
    "sent, problem",
    (None, "regions is None; give a list of [x, y, width, height]"),
    ("all", "regions is 'all'"),
    ([], "regions is []"),
    ({"x": 1}, "regions is {'x': 1}"),
    ([[0, 0, 1, 1]] * (MAX_REGIONS + 1), "regions has 65 entries, the limit is 64"),
    ([[0, 0, 9]], "region 0 (counted from 0) is [0, 0, 9]; give [x, y, width, height]"),
    ([[0, 0, 9, 9], [0, 0, 9, 9, 9]], "region 1 (counted from 0) is [0, 0, 9, 9, 9]"),
    ([[0, 0, True, 9]], "is [0, 0, True, 9]"),
    ([[0, 0, "9", 9]], "is [0, 0, '9', 9]"),
    ([0, 0, 9, 9], "region 0 (counted from 0) is 0; give"),
    ([[-1, 0, 9, 9]], "is [-1, 0, 9, 9]; its x and y are 0 or more"),
    ([[0, 0, 0, 9]], "is [0, 0, 0, 9]; its x and y are 0 or more, its width and height above 0"),
    ([[0, 0, math.nan, 9]], "is [0, 0, nan, 9]; its x and y"),
    ([[0, 0, math.inf, 9]], "is [0, 0, inf, 9]; its x and y"),
    ([[0, 0, 9.5, 9]], "is [0, 0, 9.5, 9]; pixels are whole numbers, and shares end at 1"),
    ([[0.6, 0, 0.5, 1]], "is [0.6, 0, 0.5, 1]; it reaches to 1.1 of a side, and shares end at 1"),
)
def test_what_is_no_region_is_refused_with_its_value_and_the_form(sent, problem):
    with pytest.raises(ValueError, match=re.escape(problem)):
        regions_of(sent)


def test_shares_may_add_up_to_a_little_more_than_one():
    (region,) = regions_of([[0.1 + 0.2, 0, 0.7, 1]])
    assert region.within(1000, 10) == (300, 0, 1000, 10)
    assert PictureRegion(2, 3, 4, 5).num_pixels(1000) == 20
    assert PictureRegion(0, 0, 0.5, 0.5).num_pixels(1000) == 250
    assert PictureRegion(0, 0, 400, 500).num_pixels(1000) == 1000
