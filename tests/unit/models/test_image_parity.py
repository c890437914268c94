"""The same pixels as torchvision's preprocessing by Pillow, within named tolerances."""

import cv2
import numpy as np
import pytest
from PIL import Image

from models.image import ImageRule, read_image
from tests.support import images
from tests.support.cases import cases

RULE = ImageRule(input_size=56, resize_shorter=64)
# Levels of 255. Weights of 1/256 and two roundings move a value by two at most.
EXACT_LARGEST, EXACT_MEAN = 2, 0.35
# Bicubic weights are finer. Sums between the axes are cut to 0..255, so the order of the axes shows
# in a few pixels; Pillow 13 begins with the height where that shrinks more, older ones never do.
BICUBIC_LARGEST, BICUBIC_MEAN = 8, 0.05
# Shrinking more than 8 times starts with whole blocks (models/image_geometry.py).
BLOCKS_LARGEST, BLOCKS_MEAN = 3, 0.35
# A JPEG decoded at 1/2, 1/4 or 1/8: DCT scaling is a slightly different filter.
REDUCED_LARGEST, REDUCED_MEAN = 14, 1.5
# OpenCV multiplies by K with another rounding than Pillow: one level darker.
CMYK_LARGEST, CMYK_MEAN = 3, 1.1
# The real photos: nothing of theirs is reduced at 224 of 256, some 116 of 120 are at 56 of 64.
PHOTO_LARGEST, PHOTO_MEAN = 2, 0.2
PHOTO_REDUCED_LARGEST, PHOTO_REDUCED_MEAN = 12, 0.7


def check(data: bytes, rule: ImageRule, largest: int, mean: float) -> None:
    pixels = read_image(data, rule)
    assert (pixels.shape, pixels.dtype) == (rule.shape, np.uint8)
    got_largest, got_mean = images.difference(pixels, images.reference(data, rule))
    assert got_largest <= largest
    assert got_mean <= mean


@pytest.mark.parametrize("shrink", [0.5, 0.8, 1.0, 1.25, 1.46, 2.0, 3.3, 7.9])
@pytest.mark.parametrize("aspect", [(1.0, 1.0), (1.37, 1.0), (1.0, 1.51)])
def test_png_matches_pillow_at_every_scale(shrink, aspect):
    width, height = (round(64 * shrink * side) for side in aspect)
    check(images.encode(images.make_scene(width, height), "PNG"), RULE, EXACT_LARGEST, EXACT_MEAN)


@cases(
    "width, height, rule, largest",
    *((*size, RULE, BLOCKS_LARGEST) for size in ((640, 600), (700, 1010), (1500, 1100))),
    (901, 800, ImageRule(7, 8), BLOCKS_LARGEST),  # shrinks a hundred times
    *((117, 84, ImageRule(size, 64), EXACT_LARGEST) for size in (64, 63, 1)),
)
def test_shrinking_beyond_eight_times_stays_close_and_crops_lie_in_their_place(
    width, height, rule, largest
):
    check(images.encode(images.make_scene(width, height), "PNG"), rule, largest, BLOCKS_MEAN)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("resize", ["crop", "stretch"])
@pytest.mark.parametrize(("width", "height"), [(339, 343), (407, 419), (735, 1000), (503, 259)])
def test_the_edges_of_a_picture_that_shrinks_beyond_eight_times(
    width, height, resize, interpolation
):
    scene = images.make_scene(width, height)
    scene[-3:], scene[:, -3:] = 255, 0  # whole blocks end before these
    rule = ImageRule(32, 32, resize, interpolation)
    check(images.encode(scene, "PNG"), rule, BLOCKS_LARGEST, BLOCKS_MEAN)


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0, "quality": 95}])
def test_jpeg_matches_pillow(options, mode):
    scene = Image.fromarray(images.make_scene(123, 100)).convert(mode)
    check(images.encode(scene, "JPEG", **options), RULE, EXACT_LARGEST, EXACT_MEAN)


@pytest.mark.parametrize("transform", [0, 2], ids=["CMYK", "YCCK"])
def test_adobe_cmyk_matches_pillow(transform):
    data = images.encode(
        Image.fromarray(images.make_scene(123, 100)).convert("CMYK"), "JPEG", quality=95
    )
    marker = data.index(b"Adobe")
    data = data[: marker + 11] + bytes([transform]) + data[marker + 12 :]
    check(data, RULE, CMYK_LARGEST, CMYK_MEAN)


@pytest.mark.parametrize(("width", "height"), [(301, 260), (530, 777), (1601, 1100)])
def test_reduced_decoding_stays_close_and_is_turned_upright(width, height):
    scene = images.make_scene(width, height)
    for data in (
        images.encode(scene, "JPEG", quality=90),
        images.with_orientation(scene, "JPEG", 6),
    ):
        check(data, RULE, REDUCED_LARGEST, REDUCED_MEAN)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_is_turned_upright(kind, orientation):
    # Odd margins on both sides: a mirrored crop must be the crop of the mirrored picture.
    data = images.with_orientation(images.make_scene(131, 90), kind, orientation)
    for rule in (ImageRule(57, 64), ImageRule(56, 56, "stretch")):
        check(data, rule, EXACT_LARGEST, EXACT_MEAN)


RECTANGLES = (
    ImageRule((40, 72), 80),
    ImageRule((72, 40), 80),
    ImageRule((40, 72), 72, "stretch"),
    ImageRule((31, 96), 40),  # longer than a resized picture may be, which gets borders
    ImageRule((96, 31), 40, interpolation="bicubic"),
)


@pytest.mark.parametrize("rule", RECTANGLES)
@pytest.mark.parametrize("orientation", [*range(1, 9)])
@pytest.mark.parametrize(("width", "height"), [(131, 90), (61, 200)])
def test_rectangles_are_torchvisions(rule, orientation, width, height):
    data = images.with_orientation(images.make_scene(width, height), "PNG", orientation)
    largest = EXACT_LARGEST if rule.interpolation == "bilinear" else BICUBIC_LARGEST
    check(data, rule, largest, EXACT_MEAN)


@pytest.mark.parametrize("shrink", [0.5, 1.0, 1.46, 3.3, 7.9])
@pytest.mark.parametrize("aspect", [(1.37, 1.0), (1.0, 1.51)])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_a_stretched_picture_matches_pillow(shrink, aspect, interpolation):
    width, height = (round(56 * shrink * side) for side in aspect)
    rule = ImageRule(56, 56, "stretch", interpolation)
    largest = EXACT_LARGEST if interpolation == "bilinear" else BICUBIC_LARGEST
    check(images.encode(images.make_scene(width, height), "PNG"), rule, largest, EXACT_MEAN)


@pytest.mark.parametrize("shrink", [0.5, 1.0, 1.25, 2.0, 7.9])
@pytest.mark.parametrize("aspect", [(1.37, 1.0), (1.0, 1.51)])
def test_bicubic_matches_pillow(shrink, aspect):
    width, height = (round(64 * shrink * side) for side in aspect)
    rule = ImageRule(56, 64, interpolation="bicubic")
    check(images.encode(images.make_scene(width, height), "PNG"), rule, 1, BICUBIC_MEAN)


@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "RGBA"])
def test_png_modes_match_pillow(mode):
    scene = Image.fromarray(images.make_scene(123, 100))
    if mode in ("LA", "RGBA"):
        scene.putalpha(Image.fromarray(images.make_alpha(123, 100)))
    picture = scene.quantize(40) if mode == "P" else scene.convert(mode)
    check(images.encode(picture, "PNG"), RULE, EXACT_LARGEST, EXACT_MEAN)


@pytest.mark.parametrize("transparency", [3, bytes(range(0, 240, 6))], ids=["one", "table"])
def test_palette_transparency_is_laid_over_white(transparency):
    palette = Image.fromarray(images.make_scene(123, 100)).quantize(40)
    check(images.encode(palette, "PNG", transparency=transparency), RULE, EXACT_LARGEST, EXACT_MEAN)


def test_a_colour_key_is_laid_over_white():
    scene = images.make_scene(123, 100)
    scene[40:70, 30:80] = (1, 2, 3)
    check(images.encode(scene, "PNG", transparency=(1, 2, 3)), RULE, EXACT_LARGEST, EXACT_MEAN)
    data = cv2.imencode(".png", np.full((80, 80, 3), 0x1234, np.uint16))[1].tobytes()
    key = images.png_chunk(b"tRNS", b"\x12\x34" * 3)  # of 16 bits
    assert np.unique(read_image(data[:33] + key + data[33:], RULE)).tolist() == [255]


@pytest.mark.parametrize("depth", [1, 2, 4, 8, 16])
def test_transparent_gray_level_becomes_white(depth):
    top = 2**depth - 1
    samples = (images.make_scene(123, 100)[..., 0].astype(int) * top // 255).astype(np.uint16)
    samples[30:60, 20:90] = transparent = top // 3
    shown = samples >> 8 if depth == 16 else samples * 255 // top
    shown = np.where(samples == transparent, 255, shown).astype(np.uint8)
    pixels = read_image(images.make_gray_png(samples, depth, transparent), RULE)
    expected = images.reference_crop(Image.fromarray(shown).convert("RGB"), RULE)
    assert images.difference(pixels, expected)[0] <= EXACT_LARGEST


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_sixteen_bits_keep_their_high_byte(channels):
    noise = np.random.default_rng(1).integers(0, 2**16, (100, 123, 4), dtype=np.uint16)
    noise[..., 3] = images.make_alpha(123, 100).astype(np.uint16) * 257
    samples = noise[..., :channels].squeeze()
    data = cv2.imencode(".png", samples)[1].tobytes()
    high = np.ascontiguousarray((samples >> 8).astype(np.uint8))
    swapped = high if channels == 1 else high[..., [2, 1, 0, 3][:channels]]
    shown = images.as_pillow_reads(images.encode(np.ascontiguousarray(swapped), "PNG"))
    assert (
        images.difference(read_image(data, RULE), images.reference_crop(shown, RULE))[0]
        <= EXACT_LARGEST
    )


@pytest.mark.parametrize("options", [{"lossless": True, "exact": True}, {"quality": 90}])
@pytest.mark.parametrize("has_alpha", [False, True])
def test_webp_matches_pillow(has_alpha, options):
    scene = Image.fromarray(images.make_scene(123, 100))
    if has_alpha:
        scene.putalpha(Image.fromarray(images.make_alpha(123, 100)))
    check(images.encode(scene, "WEBP", **options), RULE, EXACT_LARGEST, EXACT_MEAN)


def test_order_of_colours_is_blue_green_red():
    orange = images.encode(np.full((80, 80, 3), (250, 130, 10), np.uint8), "PNG")
    assert (read_image(orange, RULE) == (10, 130, 250)).all()


@pytest.mark.shared_data
@cases(
    "rule, largest, mean",
    (ImageRule(224, 256), PHOTO_LARGEST, PHOTO_MEAN),
    (ImageRule(56, 64), PHOTO_REDUCED_LARGEST, PHOTO_REDUCED_MEAN),
    ids=["full", "reduced"],
)
def test_real_photos_match_pillow(shared_data, rule, largest, mean):
    photos = sorted((shared_data / "photos").glob("*.JPEG"))
    assert len(photos) >= 100
    apart = [
        images.difference(read_image(data, rule), images.reference(data, rule))
        for data in (photo.read_bytes() for photo in photos)
    ]
    assert max(photo[0] for photo in apart) <= largest
    assert float(np.mean([photo[1] for photo in apart])) <= mean
