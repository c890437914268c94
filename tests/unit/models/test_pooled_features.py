import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops
from scipy.special import softmax

from models.errors import ModelSetError
from models.openvino_network import (
    CompiledNetwork,
    RuntimeOptions,
    features_network,
    pooled_features,
    with_head,
)
from tests.support.cases import cases
from tests.support.drawn_networks import random_model

SIZE, WIDTH, CLASSES = 8, 5, 4
RNG = np.random.default_rng(3)
KERNEL = RNG.normal(0, 0.1, (WIDTH, 3, 1, 1)).astype(np.float32)
HEAD = RNG.normal(0, 1, (WIDTH, CLASSES)).astype(np.float32)
CONVOLUTION = ([1, 1], [0, 0], [0, 0], [1, 1])
IMAGES = RNG.integers(0, 256, (3, SIZE, SIZE, 3), np.uint8)


def planes():
    """u8 [?,8,8,3] -> the image, and a map (N, 5, 8, 8) of it."""
    pixels = ops.parameter([-1, SIZE, SIZE, 3], ov.Type.u8, name="pixels")
    image = ops.transpose(ops.convert(pixels, "f32"), np.array([0, 3, 1, 2]))
    return pixels, ops.relu(ops.convolution(image, KERNEL, *CONVOLUTION))


def mean(of, keep_dims=False):
    return ops.reduce_mean(of, np.array([2, 3]), keep_dims=keep_dims)


def scored(features):
    return ops.matmul(features, HEAD, False, False)


def rounded(of, low=0.0, high=160.0):
    ends = [np.float32(value) for value in (low, high, low, high)]
    return ops.fake_quantize(of, *ends, 256)


def as_convolution(features):
    return ops.convolution(features, HEAD.T[:, :, None, None].copy(), *CONVOLUTION)


def int8_weights():
    stored = ops.convert(ops.constant(np.clip(HEAD * 50, -127, 127).astype(np.int8)), "f32")
    return ops.multiply(stored, np.float32(1 / 50))


def flat(of):
    return ops.reshape(of, np.array([0, -1]), special_zero=True)


def two_classes(score):
    """1 - p and p, as models add makes of one number an image."""
    score = ops.sigmoid(ops.reduce_sum(score, np.array([1]), keep_dims=True))
    return ops.concat([ops.subtract(np.float32(1), score), score], axis=1)


def chosen(scores):
    return ops.gather(scores, np.array([2, 0]), np.array(1))


ENDINGS = {
    "logits": lambda x: scored(mean(x)),
    "softmax": lambda x: ops.softmax(scored(mean(x)), 1),
    "biased": lambda x: ops.softmax(ops.add(scored(mean(x)), np.float32(1)), 1),
    "1 x 1 convolution": lambda x: ops.softmax(flat(as_convolution(mean(x, keep_dims=True))), 1),
    "convolution before the mean": lambda x: ops.softmax(mean(ops.relu(as_convolution(x))), 1),
    "INT8": lambda x: ops.softmax(rounded(scored(rounded(mean(rounded(x)))), -50, 50), 1),
    "INT8 weights": lambda x: ops.matmul(rounded(mean(x)), int8_weights(), False, False),
    "two classes of one number": lambda x: two_classes(scored(mean(x))),
    "chosen classes": lambda x: ops.softmax(chosen(scored(mean(x))), 1),
    "softmax by hand": lambda x: by_hand(scored(mean(x))),
}


def by_hand(scores):
    powers = ops.exp(ops.subtract(scores, ops.reduce_max(scores, np.array([1]), True)))
    return ops.divide(powers, ops.reduce_sum(powers, np.array([1]), True))


def network(ending):
    pixels, of = planes()
    return ov.Model([ending(of)], [pixels], "drawn")


def answers(model):
    return CompiledNetwork(model, RuntimeOptions(batch_sizes=(len(IMAGES),))).predict(IMAGES)


def expected_features():
    image = IMAGES.astype(np.float32) @ KERNEL[:, :, 0, 0].T
    return np.maximum(image, 0).mean(axis=(1, 2))


@pytest.mark.parametrize("name", ENDINGS)
def test_the_features_are_what_the_scoring_layer_takes(name):
    features = answers(features_network(network(ENDINGS[name]), "a.xml"))
    tolerance = 0.2 if name == "INT8" else 1e-3  # its map was rounded, to 160 / 255
    assert np.allclose(features, expected_features(), atol=tolerance)


@pytest.mark.parametrize("name", ENDINGS)
def test_another_head_scores_the_same_features_in_float(name):
    weights = RNG.normal(0, 0.3, (WIDTH, 2)).astype(np.float32)
    bias = np.array([0.5, -0.5], np.float32)
    features = answers(features_network(network(ENDINGS[name]), "a.xml"))
    rows = answers(with_head(network(ENDINGS[name]), weights, bias, "a.xml"))
    assert np.allclose(rows, softmax(features @ weights + bias, axis=1), atol=1e-3)


def test_a_second_output_of_the_network_does_not_matter():
    pixels, of = planes()
    features = mean(of)
    both = ov.Model([ops.softmax(scored(features), 1), features], [pixels], "two outputs")
    assert np.allclose(answers(features_network(both, "a.xml")), expected_features(), atol=1e-3)


def three_by_three(of):
    kernel = np.ones((CLASSES, WIDTH, 3, 3), np.float32)
    return ops.softmax(mean(ops.convolution(of, kernel, *CONVOLUTION)), 1)


def mean_of_rows(of):
    """(N, 8, 5): a vector for each column of the map."""
    return ops.transpose(ops.reduce_mean(of, np.array([2]), keep_dims=False), np.array([0, 2, 1]))


def around(of):
    """The scoring layer has a way around it."""
    features = mean(of)
    return ops.concat([ops.softmax(scored(features), 1), features], axis=1)


@cases(
    "ending, said",
    (three_by_three, "is a Convolution of 3 x 3"),
    (lambda of: ops.matmul(mean_of_rows(of), HEAD, False, False), r"takes \[\?,8,5\]"),
)
def test_a_network_without_a_place_to_cut_says_which_layer_was_looked_for(ending, said):
    with pytest.raises(ModelSetError, match=said) as caught:
        pooled_features(network(ending), "a.xml")
    assert caught.value.message.startswith("a.xml has no place to cut")


def test_all_of_the_image_must_pass_the_layer():
    """A layer with a way around it is none; the one before, which everything passes, is taken."""
    features = pooled_features(network(around), "a.xml")
    assert features.get_partial_shape()[1] == 3  # of the 1 x 1 convolution that makes the map


def test_a_network_without_weights_has_none():
    pixels = ops.parameter([-1, SIZE, SIZE, 3], ov.Type.u8)
    model = ov.Model([ops.reduce_mean(ops.convert(pixels, "f32"), np.array([1, 2]))], [pixels], "m")
    with pytest.raises(ModelSetError, match="looked for a fully connected layer"):
        pooled_features(model, "a.xml")


def test_places_that_are_flattened_stay_features():
    width = features_network(random_model(7), "a.xml").output().partial_shape[1]
    assert width == 32 * 4 * 4
