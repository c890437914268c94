"""The Decoder: good and bad files side by side."""

import numpy as np
import pytest

from app.deployments.decoder import Decoder
from app.errors import DeadlineError
from app.settings import Settings
from tests.support.tiny_networks import COLORS, SIZE, picture


@pytest.fixture
def decoder(tiny_set) -> Decoder:
    return Decoder(Settings(model_set=str(tiny_set), max_pixels=10_000))


async def test_good_and_bad_files_side_by_side(decoder):
    files = [b"text", picture("blue"), picture("green"), b"", picture("red", suffix=".jpg")]
    decoded = await decoder.decode(files)
    assert decoded.images.shape == (3, SIZE, SIZE, 3)
    assert decoded.images.dtype == np.uint8
    for image, color in zip(decoded.images, COLORS, strict=True):
        np.testing.assert_allclose(image[0, 0], COLORS[color], atol=2)
    assert {i: f.code for i, f in decoded.faults.items()} == {0: "not_an_image", 3: "not_an_image"}
    assert len(decoded.decode_ms) == 3
    assert all(ms > 0 for ms in decoded.decode_ms)


async def test_the_limit_of_pixels_is_the_settings(decoder):
    decoded = await decoder.decode([picture("red", 101), picture("green", 100)])
    assert decoded.faults[0].code == "too_many_pixels"
    assert len(decoded.images) == 1


async def test_what_is_too_late_is_not_decoded(decoder):
    with pytest.raises(DeadlineError, match="before the image was decoded; try again"):
        await decoder.decode([picture("red")], 0.0)


@pytest.mark.parametrize("files", [[], [b"a", b"b"]])
async def test_nothing_good_is_an_empty_tensor_of_the_right_shape(decoder, files):
    decoded = await decoder.decode(files)
    assert decoded.images.shape == (0, SIZE, SIZE, 3)
    assert len(decoded.faults) == len(files)


async def test_the_order_of_the_files_is_kept(decoder):
    colors = [list(COLORS)[i % 3] for i in range(20)]
    decoded = await decoder.decode([picture(c, 20 + i) for i, c in enumerate(colors)])
    found = [tuple(int(v) for v in image[3, 3]) for image in decoded.images]
    assert found == [COLORS[c] for c in colors]
