"""Good, bad, odd and drawn files: the right picture for each input, or why it is refused."""

import pickle
import re
import struct
import subprocess
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import cv2
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from models import image
from models.errors import (
    CorruptImageError,
    ImageError,
    TandemError,
    TooManyPixelsError,
    UnsupportedFormatError,
)
from models.image import (
    DEFAULT_MAX_FULL_PIXELS,
    DEFAULT_MAX_PIXELS,
    ImageInputs,
    ImageRule,
    check_image,
    read_image,
)
from models.image_files import default_picture
from models.image_geometry import Axis, CropSource, common_region
from models.record import ImageRecord
from tests.support.cases import cases
from tests.support.image_cases import CASES, FURTHER, SIDE, Case
from tests.support.images import (
    difference,
    encode,
    make_alpha,
    make_png,
    make_scene,
    png_chunk,
    reference,
)

RULE = ImageRule(input_size=56, resize_shorter=64)
KINDS = ["JPEG", "PNG", "WEBP"]
RULE_CASES = ImageRule(SIDE, SIDE)
LARGEST = 4  # levels: JPEG and lossy WebP do not keep red and blue to the last one
EDGE = 2  # pixels on each side of the line between both colours, which they smear
RULE_FUZZ = ImageRule(input_size=28, resize_shorter=32)
MAX_PIXELS = 1_000_000  # a flipped bit in the header must not cost the test gigabytes
BOUNDED = settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)
LARGE, SMALL, STRETCHED = ImageRule(56, 64), ImageRule(24, 28), ImageRule(24, 24, "stretch")
RULES = {"a": LARGE, "b": SMALL, "c": LARGE, "d": STRETCHED}


def resized_header(width: int, height: int) -> bytes:
    jpeg = encode(make_scene(20, 20), "JPEG")
    at = jpeg.index(b"\xff\xc0") + 5
    return jpeg[:at] + struct.pack(">HH", height, width) + jpeg[at + 4 :]


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_and_memoryview_give_the_same_pixels_in_ordered_memory(kind):
    data = encode(make_scene(100, 80), kind)
    pixels = read_image(memoryview(b"before" + data + b"after")[6:-5], RULE)
    assert (pixels == read_image(data, RULE)).all()
    assert (pixels.flags.c_contiguous, pixels.flags.writeable) == (True, True)


def test_rule_is_a_value_that_can_be_followed():
    assert pickle.loads(pickle.dumps(RULE)) == RULE
    assert len({RULE, ImageRule(56, 64), ImageRule(55, 64)}) == 2
    for size in (0, -1):
        with pytest.raises(ValueError, match=f"input_size is {size}; it must be at least 1"):
            ImageRule(size, 10)
    assert ImageRule(1, 1).shape == (1, 1, 3)
    with pytest.raises(ValueError, match="resize_shorter 10 is under input_size 11"):
        ImageRule(11, 10)


@pytest.mark.parametrize("kind", KINDS)
def test_a_single_pixel_gives_a_uniform_picture(kind):
    pixels = read_image(encode(np.full((1, 1, 3), 130, np.uint8), kind), RULE)
    assert pixels.shape == (56, 56, 3)
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) == 1
    assert abs(int(pixels[0, 0, 0]) - 130) <= 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("width", "height"), [(1, 10_000), (10_000, 1), (3, 10_000)])
def test_strips_show_their_middle(kind, width, height):
    strip, middle = np.zeros((height, width, 3), np.uint8), slice(4900, 5100)
    strip[(middle,) if height > width else (slice(None), middle)] = 200
    assert np.abs(read_image(encode(strip, kind), ImageRule(224, 256)).astype(int) - 200).max() <= 4


def test_a_strip_matches_pillow():
    data = encode(make_scene(2, 400), "PNG")
    assert difference(read_image(data, RULE), reference(data, RULE))[0] <= 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"progressive": True}], ids=["plain", "progressive"])
@pytest.mark.parametrize("kept", [0.3, 0.6, 0.9, 0.99, -20, -4, -2, -1])
def test_truncated_files_are_corrupt(kind, options, kept, capfd):
    data = encode(make_scene(120, 90), kind, **options)
    cut = data[:kept] if kept < 0 else data[: int(len(data) * kept)]
    with pytest.raises(CorruptImageError, match=f"{len(cut)} bytes hold no end"):
        read_image(cut, RULE)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("garbage", [b"\0", b"\r\n--boundary--\r\n", b"\xff\xd8\xff\xd9" * 3000])
def test_garbage_after_the_end_does_no_harm(kind, garbage):
    data = encode(make_scene(120, 90), kind)
    assert (read_image(data + garbage, RULE) == read_image(data, RULE)).all()


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"restart_marker_blocks": 3}])
@pytest.mark.parametrize("size", [(120, 90), (1200, 900)], ids=["full", "reduced"])
@pytest.mark.parametrize("kept", [0.4, 0.95])
def test_a_jpeg_that_is_cut_before_another_is_corrupt(mode, options, size, kept):
    data = encode(Image.fromarray(make_scene(*size)).convert(mode), "JPEG", **options)
    with pytest.raises(CorruptImageError):
        read_image(data[: int(kept * len(data))] + data, RULE)


def test_a_picture_may_have_another_behind_it_but_a_thumbnail_is_no_picture():
    # As phones append a gain map, or the other eye's picture.
    data = encode(np.full((90, 120, 3), 128, np.uint8), "JPEG")
    assert (read_image(data + data, RULE) == read_image(data, RULE)).all()
    data = encode(make_scene(120, 90), "JPEG", comment=encode(make_scene(16, 16), "JPEG"))
    with pytest.raises(CorruptImageError, match="hold no end"):
        read_image(data[:-500], RULE)


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_damage_in_the_middle_is_corrupt(kind):
    data = bytearray(encode(make_scene(120, 90), kind, lossless=True))
    data[200:240] = bytes(40)
    with pytest.raises(CorruptImageError, match="120 x 90 pixels"):
        read_image(bytes(data), RULE)


def webp_canvas() -> bytes:
    body = b"VP8X" + struct.pack("<I", 10) + b"\x02\0\0\0" + b"\xff" * 6
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body


@cases(
    "data, size",
    (resized_header(65_000, 65_000), "65000 x 65000"),
    (make_png(65_000, 65_000, 8, 2, png_chunk(b"IDAT", bytes(2000))), "65000 x 65000"),
    (make_png(2**31 - 1, 2**31 - 1, 16, 6, png_chunk(b"IDAT", b"")), "2147483647 x"),
    (make_png(2**20 + 1, 1, 8, 0, png_chunk(b"IDAT", b"")), "1048577 x 1 pixels; at most 1,0"),
    (webp_canvas(), "16777216 x 16777216"),
    ids=["JPEG", "PNG bomb", "largest PNG", "side", "WebP"],
)
def test_huge_headers_are_refused_before_decoding(monkeypatch, data, size):
    monkeypatch.setattr(cv2, "imdecode", lambda *_: pytest.fail("it was decoded"))
    with pytest.raises(TooManyPixelsError, match=size):
        read_image(data, RULE)


@pytest.mark.parametrize("kind", KINDS)
def test_the_limit_is_the_last_size_allowed(kind):
    data = encode(make_scene(100, 80), kind)
    assert read_image(data, RULE, max_pixels=8000).shape == (56, 56, 3)
    with pytest.raises(TooManyPixelsError, match=r"100 x 80 = 8,000 pixels; at most 7,999"):
        read_image(data, RULE, max_pixels=7999)


def test_by_default_16_mebipixels_are_decoded_in_full_and_no_more():
    """More would take over 0.6 s and 130 MB each: decision 0003."""
    assert DEFAULT_MAX_PIXELS >= 8160 * 6144  # photos of phones of fifty megapixels
    assert DEFAULT_MAX_FULL_PIXELS >= 5120 * 2880  # screenshots of 5K screens
    for width, is_taken in ((4096, True), (4097, False)):
        data = cv2.imencode(".png", np.zeros((4096, width), np.uint8))[1].tobytes()
        with nullcontext() if is_taken else pytest.raises(TooManyPixelsError, match="16,777,216"):
            check_image(data, RULE)


@cases(
    "kind, size, full_pixels",
    ("PNG", (1000, 800), 800_000),
    ("WEBP", (1000, 800), 800_000),
    ("JPEG", (1000, 800), 50_000),  # decoded at a quarter of its sides
    ("JPEG", (3000, 100), 300_000),  # too narrow for that
)
def test_only_what_cannot_be_reduced_has_the_lower_limit(kind, size, full_pixels):
    data = encode(make_scene(*size), kind)
    assert check_image(data, RULE).full_pixels == full_pixels
    assert read_image(data, RULE, max_full_pixels=full_pixels).shape == (56, 56, 3)
    says = f"at most {full_pixels - 1:,} are decoded: send"
    with pytest.raises(TooManyPixelsError, match=says) as refused:
        read_image(data, RULE, max_full_pixels=full_pixels - 1)
    assert "twice" not in refused.value.message  # it has 8 bits a sample


def test_16_bit_samples_count_twice():
    data = cv2.imencode(".png", np.zeros((30, 40, 4), np.uint16))[1].tobytes()
    assert check_image(data, RULE).full_pixels == 2400
    with pytest.raises(TooManyPixelsError, match=r"16-bit samples count twice"):
        read_image(data, RULE, max_full_pixels=2399)


@pytest.mark.parametrize("between", [b"", b"\xff\xfe\0\4\xff\xd9"], ids=["plain", "hidden"])
def test_a_progressive_jpeg_of_very_many_scans_is_refused_but_not_behind_its_end(between):
    data = encode(make_scene(120, 90), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    with pytest.raises(UnsupportedFormatError, match="more than 100 scans"):
        read_image(data[:-2] + (between + data[last:-2]) * 120 + data[-2:], RULE)
    film = b"\xff\xda\0\2" * 500  # what a motion photo carries behind the picture
    assert (read_image(data + film, RULE) == read_image(data, RULE)).all()


def test_pixels_of_another_size_than_announced_are_refused(monkeypatch):
    monkeypatch.setattr(cv2, "imdecode", lambda *_args: np.zeros((80, 99, 3), np.uint8))
    with pytest.raises(CorruptImageError, match="announces 100 x 80"):
        read_image(encode(make_scene(100, 80), "PNG"), RULE)


@pytest.mark.parametrize(
    ("width", "height", "reduction"), [(255, 400, 1), (256, 400, 2), (512, 600, 4), (1200, 1024, 8)]
)
def test_large_jpegs_are_decoded_at_reduced_scale(monkeypatch, width, height, reduction):
    decode, shapes = cv2.imdecode, []

    def spy(*args):
        pixels = decode(*args)
        shapes.append(pixels.shape)
        return pixels

    monkeypatch.setattr(cv2, "imdecode", spy)
    read_image(encode(np.zeros((height, width, 3), np.uint8), "JPEG"), RULE)
    assert shapes == [(-(-height // reduction), -(-width // reduction), 3)]


@pytest.mark.parametrize("kind", ["WEBP", "PNG"])
def test_of_an_animation_the_first_picture_is_taken(kind):
    frames = [Image.fromarray(np.full((80, 80, 3), level, np.uint8)) for level in (40, 200)]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encode(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert np.unique(read_image(data, RULE)).tolist() == [40]


def test_a_png_of_nothing_but_its_picture_is_not_copied():
    data = encode(make_scene(40, 30), "PNG")
    picture = default_picture(memoryview(data + b"behind its end"))
    assert isinstance(picture, memoryview)
    with_text = data[:33] + png_chunk(b"tEXt", b"a\0b") + data[33:]
    for other in (data, with_text, (data[:-4] + bytes(4))):
        assert default_picture(memoryview(other)) == data
    assert picture == data


@pytest.mark.parametrize(
    ("code", "kind"), [(cv2.Error.StsNoMem, TandemError), (cv2.Error.StsAssert, CorruptImageError)]
)
def test_whatever_opencv_raises_becomes_ours(monkeypatch, code, kind):
    def fail(*_args):
        error = cv2.error("made to fail")
        error.code = code
        raise error

    monkeypatch.setattr(cv2, "imdecode", fail)
    with pytest.raises(TandemError) as caught:
        read_image(encode(make_scene(20, 20), "PNG"), RULE)
    assert type(caught.value) is kind


def test_threads_share_the_function():
    files = [encode(make_scene(90 + n, 80, seed=n), "JPEG") for n in range(4)]
    alone = [read_image(data, RULE) for data in files]
    with ThreadPoolExecutor(4) as threads:
        together = threads.map(lambda data: [read_image(data, RULE) for _ in range(20)], files)
        for pixels, expected in zip(together, alone, strict=True):
            assert all((each == expected).all() for each in pixels)


def test_a_large_shrink_allocates_a_fraction_of_its_source():
    source = np.zeros((2400, 2400, 3), np.uint8)
    axis = Axis(2400, 2400 / 64, offset=4, size=56, interpolation="bilinear", ends=(0, 2400))
    rows, columns = common_region([(axis, axis)])
    region = source[rows, columns]
    tracemalloc.start()
    CropSource(region, rows.start, columns.start).resize(axis, axis)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < region.nbytes / 4


def check(case: Case, data: bytes) -> None:
    if case.code:
        with pytest.raises(ImageError) as caught:
            read_image(data, RULE_CASES)
        assert (caught.value.code, caught.value.status) == (case.code, case.status)
        assert re.search(case.says, caught.value.message)
        return
    away = np.r_[0 : SIDE // 2 - EDGE, SIDE // 2 + EDGE : SIDE]
    shown, right = read_image(data, RULE_CASES)[..., ::-1], case.picture
    assert difference(shown[away][:, away], right[away][:, away])[0] <= LARGEST


@pytest.mark.parametrize("case", [*CASES, *FURTHER], ids=lambda case: case.name)
def test_each_kind(case):
    check(case, case.make())


@pytest.mark.shared_data
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_file_that_failed_and_all_are_in_the_table(shared_data, case):
    folder = shared_data.parent / "cases" / "images"
    check(case, (folder / case.name).read_bytes())
    assert {path.name for path in folder.iterdir()} == {case.name for case in CASES}


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
        pixels = read_image(data, RULE_FUZZ, max_pixels=MAX_PIXELS)
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
        read_image(cut, RULE_FUZZ, max_pixels=MAX_PIXELS)


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


@pytest.fixture
def inputs() -> ImageInputs:
    return ImageInputs(RULES)


def test_each_member_gets_what_it_would_get_alone_cut_from_a_batch_and_not_copied(inputs):
    files = [encode(make_scene(123 + n, 100), "PNG") for n in range(3)]
    batch = np.stack([inputs.read(data) for data in files])
    assert (batch.shape, batch.dtype) == ((3, inputs.num_bytes), np.uint8)
    for name, rule in RULES.items():
        own = inputs.of(name, batch)
        assert np.shares_memory(own, batch)
        for row, data in zip(own, files, strict=True):
            np.testing.assert_array_equal(row, read_image(data, rule))


def test_a_file_is_decoded_once_and_each_distinct_input_made_once(inputs, monkeypatch):
    decoded, resized = [], []
    decode, resize = cv2.imdecode, image.decode_images

    def noting_decoded(*args):
        decoded.append(args)
        return decode(*args)

    def noting_resized(data, rules, checked):
        resized.extend(rules)
        return resize(data, rules, checked)

    monkeypatch.setattr(cv2, "imdecode", noting_decoded)
    monkeypatch.setattr(image, "decode_images", noting_resized)
    inputs.read(encode(make_scene(123, 100), "PNG"))
    assert (len(decoded), resized) == (1, [LARGE, SMALL, STRETCHED])


def test_the_largest_input_says_how_far_a_jpeg_is_reduced(inputs):
    """At 320 px the smaller input alone would be made of a quarter, the larger one of a half."""
    data = encode(make_scene(320, 320), "JPEG", quality=95)
    assert inputs.check(data).reduction == 2
    assert ImageInputs({"b": SMALL}).check(data).reduction == 4
    (own,) = inputs.of("b", inputs.read(data)[None])
    assert difference(own, read_image(data, SMALL))[1] < 2


def test_members_that_take_the_same_share_an_image_of_it_and_no_image_is_a_batch_too(inputs):
    assert inputs.of("b", inputs.none()).shape == (0, 24, 24, 3)
    inputs = ImageInputs({"a": LARGE, "b": ImageRule(56, 64)})
    assert (inputs.rules, inputs.num_bytes) == ((LARGE,), 3 * 56 * 56)
    pixels = inputs.read(encode(make_scene(123, 100), "PNG"))
    assert pixels.shape == (56, 56, 3)
    assert np.shares_memory(inputs.of("b", pixels[None]), pixels)
    assert inputs.none().shape == (0, 56, 56, 3)


def test_records_have_the_text_that_they_had_before_there_were_more_fields():
    """Fingerprints of sets, and so caches and rolling updates, hang on it."""
    usual = ImageRecord(input_size=16, resize_shorter=18)
    assert usual.key == '{"input_size":16,"resize_shorter":18,"color_order":"BGR"}'
    other = ImageRecord(input_size=16, resize_shorter=16, resize="stretch")
    assert other.key.endswith('"resize":"stretch"}')
    for make in (ImageRule, ImageRecord):
        with pytest.raises(ValueError, match="stretch"):  # has no shorter side
            make(input_size=16, resize_shorter=18, resize="stretch")


def test_several_views_of_each_image_are_cut_by_member_too(inputs):
    """What a function of the operator's makes of each input (app/stages/own_functions.py)."""
    image = inputs.read(encode(make_scene(123, 100), "PNG"))
    batch = np.stack([image, 255 - image])
    parts = inputs.split(batch)
    assert [part.shape for part in parts] == [(2, s, s, 3) for s in (56, 24, 24)]
    np.testing.assert_array_equal(inputs.joined(parts), batch)
    mirrored = [np.stack([part, part[:, :, ::-1]], axis=1) for part in parts]  # (N, 2, H, W, 3)
    views = inputs.joined(mirrored)
    assert views.shape == (2, 2, inputs.num_bytes)
    for name, rule in RULES.items():
        own = inputs.of(name, views)
        assert own.shape == (2, 2, rule.input_size, rule.input_size, 3)
        np.testing.assert_array_equal(own[:, 1], inputs.of(name, batch)[:, :, ::-1])


def test_scipy_is_imported_by_who_reads_images_and_before_the_first():
    script = """
import sys
from models.image import ImageRule
from models.image import ImageInputs
inputs = ImageInputs({"one": ImageRule(24, 28)})
assert "scipy" not in sys.modules
inputs.warm_up()
assert "scipy.sparse" in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
