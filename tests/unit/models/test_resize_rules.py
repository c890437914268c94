"""Letterbox, squash and smart_resize give the pixels that Pillow computes by itself."""

import re
from typing import Any

import numpy as np
import pytest
from PIL import Image

from models.image import ImageInputs, ImageRule, decode_regions, read_image
from models.image_geometry import PictureRegion
from models.record import ImageRecord
from tests.support import images
from tests.support.cases import cases

LARGEST, MEAN = 2, 0.35  # levels of 255: weights of 1/256, and two roundings
BICUBIC_LARGEST = 8  # sums between the axes are cut to 0..255
REDUCED_LARGEST, REDUCED_MEAN = 14, 1.5  # a JPEG decoded at 1/2, 1/4 or 1/8


def resized(picture: Image.Image, height: int, width: int, rule: ImageRule) -> Image.Image:
    return picture.resize((width, height), Image.Resampling[rule.interpolation.upper()])


def letterbox(picture: Image.Image, rule: ImageRule) -> Image.Image:
    """As ultralytics' LetterBox computes its sizes and borders."""
    height, width, _ = rule.shape
    ratio = min(height / picture.height, width / picture.width)
    wide, high = round(picture.width * ratio), round(picture.height * ratio)
    left, top = (width - wide) / 2, (height - high) / 2
    out = Image.new("RGB", (width, height), (rule.fill,) * 3)
    out.paste(resized(picture, high, wide, rule), (round(left - 0.1), round(top - 0.1)))
    return out


def smart_resize(picture: Image.Image, rule: ImageRule) -> Image.Image:
    """As keras.utils.smart_resize computes its crop box."""
    height, width, _ = rule.shape
    high = min(picture.height, int(float(picture.width * height) / width))
    wide = min(picture.width, int(float(picture.height * width) / height))
    top, left = int((picture.height - high) / 2), int((picture.width - wide) / 2)
    part = picture.crop((left, top, left + wide, top + high))
    return resized(part, height, width, rule)


def squash(picture: Image.Image, rule: ImageRule) -> Image.Image:
    """As torchvision's Resize((h, w)) and CenterCrop, by timm's sizes."""
    height, width, _ = rule.shape
    factor = rule.resize_shorter / min(height, width)
    high, wide = int(height * factor), int(width * factor)
    top, left = round((high - height) / 2), round((wide - width) / 2)
    return resized(picture, high, wide, rule).crop((left, top, left + width, top + height))


RULES: dict[Any, tuple[Any, dict[str, Any]]] = {
    "letterbox": (letterbox, {"fill": 114}),
    "smart_resize": (smart_resize, {}),
    "squash": (squash, {"shorter": 8 / 7}),
}
rules = pytest.mark.parametrize("name", RULES)
sizes = pytest.mark.parametrize("size", [56, (40, 72), (72, 40)], ids=str)


def rule_of(name, size, interpolation="bilinear"):
    own = dict(RULES[name][1])
    sides = (size, size) if isinstance(size, int) else size
    shorter = round(min(sides) * own.pop("shorter")) if "shorter" in own else max(sides)
    return ImageRule(size, shorter, name, interpolation, **own)


def check(data: bytes, name: str, rule: ImageRule, largest: int, mean: float = MEAN) -> None:
    expected = np.asarray(RULES[name][0](images.as_pillow_reads(data), rule))[..., ::-1]
    found = images.difference(read_image(data, rule), expected)
    assert found[0] <= largest
    assert found[1] <= mean


@rules
@sizes
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("width", "height"), [(131, 90), (61, 200), (33, 20), (350, 177)])
def test_they_are_pillows(name, size, interpolation, width, height):
    data = images.encode(images.make_scene(width, height), "PNG")
    largest = LARGEST if interpolation == "bilinear" else BICUBIC_LARGEST
    check(data, name, rule_of(name, size, interpolation), largest)


@rules
@sizes
@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_is_turned_upright(name, size, orientation):
    data = images.with_orientation(images.make_scene(151, 90), "PNG", orientation)
    check(data, name, rule_of(name, size), LARGEST)


@rules
@sizes
@pytest.mark.parametrize(("width", "height"), [(1601, 700), (500, 1333), (640, 2000)])
def test_a_jpeg_decoded_at_a_reduced_scale_stays_close(name, size, width, height):
    data = images.encode(images.make_scene(width, height), "JPEG", quality=90)
    check(data, name, rule_of(name, size), REDUCED_LARGEST, REDUCED_MEAN)


@rules
def test_extreme_pictures_have_a_pixel_at_least(name):
    rule = rule_of(name, (40, 72))
    for width, height in ((1, 1), (3000, 2), (2, 3000), (1, 5000)):
        data = images.encode(images.make_scene(width, height), "PNG")
        assert read_image(data, rule).shape == (40, 72, 3)


@rules
def test_a_region_is_as_its_crop_alone_and_members_may_have_different_rules(name):
    scene = images.make_scene(160, 120)
    data, rule = images.encode(scene, "PNG"), rule_of(name, (40, 72))
    inputs = ImageInputs({"a": rule, "b": ImageRule(32, 40), "c": ImageRule(32, 32, "stretch")})
    pixels = inputs.read(data)
    np.testing.assert_array_equal(inputs.of("a", pixels[None])[0], read_image(data, rule))
    checked = inputs.check(data, of_regions=True)
    (part,) = decode_regions(data, (rule,), checked, [PictureRegion(20, 10, 90, 71)])
    alone = images.encode(scene[10:81, 20:110], "PNG")
    np.testing.assert_array_equal(np.asarray(part).reshape(rule.shape), read_image(alone, rule))


def test_a_letterbox_shows_the_whole_picture_between_borders_of_the_fill():
    white = images.encode(np.full((30, 60, 3), 255, np.uint8), "PNG")
    pixels = read_image(white, ImageRule(64, 64, "letterbox", fill=9))
    assert (pixels[:16] == 9).all()
    assert (pixels[16:48] == 255).all()
    assert (pixels[48:] == 9).all()


@cases(
    "fields, says",
    ({"resize": "letterbox", "resize_shorter": 70}, "letterbox has no resize_shorter: let it be"),
    ({"resize": "smart_resize", "resize_shorter": 70}, "smart_resize has no resize_shorter"),
    ({"resize": "squash", "resize_shorter": 63}, "the centre crop would not fit"),
    ({"resize": "squash", "fill": 3}, "squash makes no borders: leave out fill 3"),
    ({"resize": "letterbox", "fill": 256}, "less than or equal to 255"),
)
def test_what_is_no_rule(fields, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        ImageRecord.model_validate({"input_size": 64, "resize_shorter": 64} | fields)


def test_a_records_key_has_no_fill_unless_it_says_one():
    assert "fill" not in ImageRecord(input_size=64, resize_shorter=64).key
    one, other = (
        ImageRecord(input_size=64, resize_shorter=64, resize="letterbox", fill=fill)
        for fill in (0, 114)
    )
    assert one.key != other.key
