"""Several inputs of one picture: each as if it had been made alone, of one decode."""

import subprocess
import sys
from typing import Any

import cv2
import numpy as np
import pytest

from models.image import ImageRule, read_image
from models.image_inputs import ImageInputs
from models.image_record import ImageRecord
from tests.support.images import difference, encode, make_scene

LARGE, SMALL, STRETCHED = ImageRule(56, 64), ImageRule(24, 28), ImageRule(24, 24, "stretch")
RULES = {"a": LARGE, "b": SMALL, "c": LARGE, "d": STRETCHED}


@pytest.fixture
def inputs() -> ImageInputs:
    return ImageInputs(RULES)


def test_each_member_gets_what_it_would_get_alone(inputs):
    data = encode(make_scene(123, 100), "PNG")
    image = inputs.read(data)
    assert (image.shape, image.dtype) == ((inputs.num_bytes,), np.uint8)
    for name, rule in RULES.items():
        (own,) = inputs.of(name, image[None])
        np.testing.assert_array_equal(own, read_image(data, rule))


def test_a_batch_is_cut_by_member_and_not_copied(inputs):
    files = [encode(make_scene(90 + n, 100), "PNG") for n in range(3)]
    batch = np.stack([inputs.read(data) for data in files])
    for name, rule in RULES.items():
        own = inputs.of(name, batch)
        assert np.shares_memory(own, batch)
        for row, data in zip(own, files, strict=True):
            np.testing.assert_array_equal(row, read_image(data, rule))


def test_a_file_is_decoded_once_and_each_distinct_input_made_once(inputs, monkeypatch):
    decoded, resized = [], []
    decode, resize = cv2.imdecode, ImageInputs.decode.__globals__["decode_images"]

    def noting_decoded(*args: Any) -> Any:
        decoded.append(args)
        return decode(*args)

    def noting_resized(data: Any, rules: Any, checked: Any) -> Any:
        resized.extend(rules)
        return resize(data, rules, checked)

    monkeypatch.setattr("models.image.cv2.imdecode", noting_decoded)
    monkeypatch.setattr("models.image_inputs.decode_images", noting_resized)
    inputs.read(encode(make_scene(123, 100), "PNG"))
    assert len(decoded) == 1
    assert resized == [LARGE, SMALL, STRETCHED]


def test_the_largest_input_says_how_far_a_jpeg_is_reduced(inputs):
    """At 320 px the smaller input alone would be made of a quarter, the larger one of a half."""
    data = encode(make_scene(320, 320), "JPEG", quality=95)
    assert inputs.check(data).reduction == 2
    assert ImageInputs({"b": SMALL}).check(data).reduction == 4
    (own,) = inputs.of("b", inputs.read(data)[None])
    assert difference(own, read_image(data, SMALL))[1] < 2


def test_members_that_take_the_same_share_an_image_of_it():
    inputs = ImageInputs({"a": LARGE, "b": ImageRule(56, 64)})
    assert (inputs.rules, inputs.num_bytes) == ((LARGE,), 3 * 56 * 56)
    image = inputs.read(encode(make_scene(123, 100), "PNG"))
    assert image.shape == (56, 56, 3)
    assert np.shares_memory(inputs.of("b", image[None]), image)
    assert inputs.none().shape == (0, 56, 56, 3)


def test_no_image_is_a_batch_too(inputs):
    assert inputs.of("b", inputs.none()).shape == (0, 24, 24, 3)


def test_records_have_the_text_that_they_had_before_there_were_more_fields():
    """Fingerprints of sets, and so caches and rolling updates, hang on it."""
    usual = ImageRecord(input_size=16, resize_shorter=18)
    assert usual.key == '{"input_size":16,"resize_shorter":18,"color_order":"BGR"}'
    other = ImageRecord(input_size=16, resize_shorter=16, resize="stretch")
    assert other.key.endswith('"resize":"stretch"}')


@pytest.mark.parametrize("make", [ImageRule, ImageRecord])
def test_a_stretched_picture_has_no_shorter_side(make):
    with pytest.raises(ValueError, match="stretch"):
        make(input_size=16, resize_shorter=18, resize="stretch")


def test_several_views_of_each_image_are_cut_by_member_too(inputs):
    """What a function of the operator's makes of each input (app/functions/stages.py)."""
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
from models.image_inputs import ImageInputs
inputs = ImageInputs({"one": ImageRule(24, 28)})
assert "scipy" not in sys.modules
inputs.warm_up()
assert "scipy.sparse" in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
