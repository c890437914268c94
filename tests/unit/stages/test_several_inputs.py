"""A function of the operator's where members take different inputs: a call for each of them."""

import numpy as np
import pytest

from app.stages.own_functions import FunctionCalls, OwnFunction, OwnPreprocess
from models.image import ImageInputs, ImageRule

INPUTS = ImageInputs({"large": ImageRule(8, 8), "small": ImageRule(4, 4)})
BATCH = np.random.default_rng(3).integers(0, 256, (5, INPUTS.num_bytes), np.uint8)


def own(function, num_views: int) -> OwnPreprocess:
    calls = FunctionCalls(OwnFunction("preprocess", "tests:function", function, "0"), 2)
    return OwnPreprocess(calls, num_views, INPUTS)


@pytest.mark.parametrize("member", ["large", "small"])
async def test_each_input_has_its_views(member):
    def mirrored(images):
        return np.concatenate([images, images[:, :, ::-1]])

    views = await own(mirrored, 2).views(BATCH)
    expected = INPUTS.of(member, BATCH)
    np.testing.assert_array_equal(INPUTS.of(member, views)[:, 0], expected)
    np.testing.assert_array_equal(INPUTS.of(member, views)[:, 1], expected[:, :, ::-1])


async def test_one_view_is_an_image_as_the_decoder_makes_it():
    views = await own(lambda images: 255 - images, 1).views(BATCH)
    np.testing.assert_array_equal(views, 255 - BATCH)
