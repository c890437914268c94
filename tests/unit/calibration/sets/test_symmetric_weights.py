"""Weights with a zero point, as TFLite keeps them, and the int8 ones that take their place."""

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

from calibration.sets.symmetric_weights import make_weights_symmetric
from models.runtime import CompiledNetwork, RuntimeOptions

SIDE, SCALE = 8, 0.02
IMAGES = np.random.default_rng(3).integers(0, 256, (2, SIDE, SIDE, 3)).astype(np.uint8)


def network(quantised: np.ndarray, zero_point: int, kind: ov.Type = ov.Type.u8) -> ov.Model:
    """Return a classifier of one 3 x 3 convolution, its weights (3, 3, I, O) as TFLite has them."""
    pixels = ops.parameter([-1, SIDE, SIDE, 3], ov.Type.u8)
    planes = ops.transpose(ops.convert(pixels, "f32"), np.array([0, 3, 1, 2]))
    low, high = np.float32(0), np.float32(255)
    rounded = ops.fake_quantize(planes, low, high, low, high, 256)
    stored = ops.convert(ops.constant(quantised.astype(kind.to_dtype())), "f32")
    shifted = ops.subtract(stored, np.float32(zero_point))
    kernel = ops.transpose(ops.multiply(shifted, np.float32(SCALE)), np.array([3, 2, 0, 1]))
    features = ops.convolution(rounded, kernel, [1, 1], [1, 1], [1, 1], [1, 1])
    means = ops.reduce_mean(features, np.array([2, 3]), keep_dims=False)
    return ov.Model([ops.softmax(ops.multiply(means, np.float32(0.01)), 1)], [pixels], "one")


def weights(low: int, high: int) -> np.ndarray:
    return np.random.default_rng(1).integers(low, high + 1, (3, 3, 3, 16))


def answers(model: ov.Model) -> np.ndarray:
    return CompiledNetwork(model, RuntimeOptions(batch_sizes=(2,))).predict(IMAGES)


def stored_weights(model: ov.Model) -> list[np.ndarray]:
    constants = (node for node in model.get_ops() if node.get_type_name() == "Constant")
    return [node.data for node in constants if node.get_element_type() == ov.Type.i8]


def test_weights_that_fit_are_the_same_numbers():
    quantised = weights(13, 253)
    model = network(quantised, 126)
    assert make_weights_symmetric(model) == 1
    (found,) = stored_weights(model)
    np.testing.assert_array_equal(found, (quantised - 126).transpose(3, 2, 0, 1))
    np.testing.assert_allclose(answers(model), answers(network(quantised, 126)), atol=1e-2)


def test_weights_that_do_not_fit_get_a_scale_of_their_own():
    quantised = weights(0, 255)
    before, after = network(quantised, 20), network(quantised, 20)
    assert make_weights_symmetric(after) == 1
    (found,) = stored_weights(after)
    assert found.max() == 127
    np.testing.assert_allclose(answers(after), answers(before), atol=1e-2)


@pytest.mark.parametrize("kind", [ov.Type.i8, ov.Type.f32])
def test_other_weights_stay(kind):
    model = network(weights(-100, 100), 0, kind)
    assert make_weights_symmetric(model) == 0


def test_weights_that_are_all_alike():
    model = network(np.full((3, 3, 3, 16), 9), 9)
    assert make_weights_symmetric(model) == 1
    assert np.isfinite(answers(model)).all()
