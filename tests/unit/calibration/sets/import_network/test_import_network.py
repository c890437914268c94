"""Classifiers of every shape become members that answer as numpy does."""

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

from calibration.sets.classes import ClassMap
from calibration.sets.fold import Normalisation
from models.runtime import CompiledNetwork, RuntimeOptions
from tests.support.calibration.classifiers import (
    IMAGENET,
    IMAGES,
    MATRIX,
    PLAIN,
    SIDE,
    answers,
    classifier,
    expected,
    read,
    save,
    softmax,
)
from tests.support.calibration.onnx_file import onnx_classifier
from tests.support.tiny_networks import tiny_model


@pytest.mark.parametrize(
    ("shape", "channels", "input_size"),
    [
        ([-1, 3, SIDE, SIDE], 1, None),
        ([-1, 3, SIDE, SIDE], 1, SIDE),
        ([-1, 3, -1, -1], 1, SIDE),
        ([1, 3, SIDE, SIDE], 1, None),
        ([-1, SIDE, SIDE, 3], 3, None),
        ([-1, -1, -1, 3], 3, SIDE),
        ([2, SIDE, SIDE, 3], 3, None),
    ],
)
def test_layout_and_size_are_found(tmp_path, shape, channels, input_size):
    path = save(classifier(shape, channels=channels), tmp_path)
    imported = read(path, input_size, IMAGENET)
    assert (imported.input_size, imported.num_classes, imported.precision) == (SIDE, 4, "FP16")
    assert imported.network.input().element_type == ov.Type.u8
    assert imported.network.input().partial_shape == ov.PartialShape([-1, SIDE, SIDE, 3])
    assert imported.network.output().partial_shape == ov.PartialShape([-1, 4])
    assert np.allclose(answers(imported), expected(IMAGENET), atol=1e-5)


@pytest.mark.parametrize("shape", [[-1, 3, -1, -1], [1, 3, SIDE, SIDE]])
@pytest.mark.parametrize("end", ["probabilities", "square"])
def test_the_ending_is_found(tmp_path, shape, end):
    imported = read(save(classifier(shape, end), tmp_path), SIDE, IMAGENET)
    assert imported.network.output().partial_shape == ov.PartialShape([-1, 4])
    assert np.allclose(answers(imported), expected(IMAGENET), atol=1e-5)


@pytest.mark.parametrize(
    "how",
    [
        PLAIN,
        IMAGENET,
        Normalisation(color_order="BGR"),
        Normalisation((10.0, 120.0, 200.0), (20.0, 50.0, 125.0), "RGB"),
        Normalisation((10.0, 120.0, 200.0), (20.0, 50.0, 125.0), "BGR"),
        Normalisation((0.0, 0.0, 0.0), (255.0, -255.0, 127.5), "RGB"),
    ],
)
@pytest.mark.parametrize("channels", [1, 3])
def test_mean_scale_and_colour_order_are_those_of_numpy(tmp_path, how, channels):
    shape = [-1, 3, SIDE, SIDE] if channels == 1 else [-1, SIDE, SIDE, 3]
    imported = read(save(classifier(shape, channels=channels), tmp_path), None, how)
    assert np.allclose(answers(imported), expected(how), atol=1e-5)
    assert not np.allclose(expected(how), expected(Normalisation((1.0,) * 3, (99.0,) * 3)))


@pytest.mark.parametrize("kind", [ov.Type.f16, ov.Type.f64, ov.Type.i32])
def test_other_number_types_are_converted(tmp_path, kind):
    path = save(classifier([-1, 3, SIDE, SIDE], kind=kind), tmp_path)
    found = answers(read(path, None, Normalisation((0.0,) * 3, (1.0,) * 3)))
    assert (
        found.argmax(axis=1).tolist()
        == expected(Normalisation((0.0,) * 3, (1.0,) * 3)).argmax(axis=1).tolist()
    )


def test_where_the_pixels_are_matters_not_only_their_mean(tmp_path):
    """A transposed layout has the same mean: this one looks at a single pixel."""
    pixels = ops.parameter([-1, 3, SIDE, SIDE], ov.Type.f32)
    corner = ops.slice(pixels, [0, 1, 2], [3, 2, 3], [1, 1, 1], [1, 2, 3])
    flat = ops.reshape(corner, np.array([0, -1]), special_zero=True)
    imported = read(save(ov.Model([flat], [pixels], "one"), tmp_path), None, PLAIN)
    chosen = IMAGES[:, 1, 2, :].astype(np.float64) / 255
    assert np.allclose(answers(imported), softmax(chosen), atol=1e-5)


def test_probabilities_are_told_from_logits_by_looking(tmp_path):
    shape = [-1, 3, SIDE, SIDE]
    same = read(save(classifier(shape, "probabilities"), tmp_path), None, PLAIN)
    assert np.allclose(answers(same), expected(PLAIN), atol=1e-5)
    twice = read(tmp_path / "net.xml", None, PLAIN, "logits")
    assert np.allclose(answers(twice), softmax(expected(PLAIN)), atol=1e-5)
    kept = read(tmp_path / "net.xml", None, PLAIN, "probabilities")
    assert np.allclose(answers(kept), expected(PLAIN), atol=1e-5)


def test_a_folded_network_is_taken_as_it_is(tmp_path):
    imported = read(save(tiny_model(), tmp_path), None, Normalisation((99.0,) * 3))
    images = np.random.default_rng(3).integers(0, 256, (4, 16, 16, 3)).astype(np.uint8)
    before = CompiledNetwork(tmp_path / "net.xml", RuntimeOptions(batch_sizes=(4,)))
    assert np.allclose(answers(imported, images), before.predict(images), atol=1e-5)
    assert (imported.input_size, imported.num_classes) == (16, 3)


@pytest.mark.parametrize(
    ("shape", "input_size"), [([1, SIDE, SIDE, 3], None), ([-1, -1, -1, 3], SIDE)]
)
@pytest.mark.parametrize("end", ["probabilities", "logits", "square"])
def test_a_folded_network_gets_an_open_batch_a_size_and_softmax_too(
    tmp_path, shape, input_size, end
):
    path = save(classifier(shape, end, ov.Type.u8, channels=3), tmp_path)
    imported = read(path, input_size, IMAGENET)
    assert imported.network.input().partial_shape == ov.PartialShape([-1, SIDE, SIDE, 3])
    plain = Normalisation((0.0,) * 3, (1.0,) * 3, "BGR")
    assert np.allclose(answers(imported), expected(plain), atol=1e-5)


def test_a_quantised_network_is_int8(tmp_path):
    pixels = ops.parameter([-1, 3, SIDE, SIDE], ov.Type.f32)
    low, high = np.float32(0), np.float32(1)
    rounded = ops.fake_quantize(pixels, low, high, low, high, 256)
    logits = ops.matmul(ops.reduce_mean(rounded, np.array([2, 3]), False), MATRIX, False, False)
    imported = read(save(ov.Model([logits], [pixels], "int8"), tmp_path), None, PLAIN)
    assert imported.precision == "INT8"
    assert np.allclose(answers(imported), expected(PLAIN), atol=1e-2)


@pytest.mark.parametrize("order", ["RGB", "BGR"])
@pytest.mark.parametrize("channels", [1, 3])
def test_pixels_are_taken_in_the_networks_own_order_and_layout(tmp_path, order, channels):
    shape = [-1, 3, SIDE, SIDE] if channels == 1 else [-1, SIDE, SIDE, 3]
    path = save(classifier(shape, kind=ov.Type.u8, channels=channels), tmp_path)
    imported = read(path, None, IMAGENET, pixel_order=order)
    plain = Normalisation((0.0,) * 3, (1.0,) * 3, order)
    assert np.allclose(answers(imported), expected(plain), atol=1e-5)


def test_int8_pixels_are_the_usual_ones_less_128(tmp_path):
    path = save(classifier([1, SIDE, SIDE, 3], kind=ov.Type.i8, channels=3), tmp_path)
    found = answers(read(path, None, IMAGENET, pixel_order="RGB"))
    assert np.allclose(found, expected(Normalisation((128.0,) * 3, (1.0,) * 3)), atol=1e-5)


@pytest.mark.parametrize("number", [1, 2])
def test_a_batch_that_only_a_reshape_builds_in_is_freed(tmp_path, number):
    path = save(reshaped(number, np.array([number, 4])), tmp_path)
    imported = read(path, None, PLAIN)
    assert imported.fixed_batch is None
    assert imported.network.input().partial_shape[0].is_dynamic
    assert np.allclose(answers(imported), expected(PLAIN), atol=1e-5)


def reshaped(number: int, shape: np.ndarray) -> ov.Model:
    """Return a classifier for so many images whose logits are reshaped."""
    pixels = ops.parameter([number, 3, SIDE, SIDE], ov.Type.f32)
    square = ops.matmul(ops.reduce_mean(pixels, np.array([2, 3]), False), MATRIX, False, False)
    whole = ops.unsqueeze(square, np.array([2, 3]))
    return ov.Model([ops.reshape(whole, shape, False)], [pixels], "reshaped")


def test_a_batch_that_cannot_be_freed_runs_so_many_at_a_time(tmp_path):
    """The images' axis is gone in between: with more of them it would be another network."""
    pixels = ops.parameter([1, 3, SIDE, SIDE], ov.Type.f32)
    means = ops.reduce_mean(pixels, np.array([2, 3]), False)
    flat = ops.matmul(ops.reshape(means, np.array([3]), False), MATRIX, False, False)
    model = ov.Model([ops.reshape(flat, np.array([1, 4]), False)], [pixels], "fixed")
    imported = read(save(model, tmp_path), None, PLAIN)
    assert imported.fixed_batch == 1
    network = CompiledNetwork(imported.network, RuntimeOptions(batch_sizes=(1, 8)))
    assert (network.batch_sizes, network.max_batch_size) == ((1,), 1)
    assert np.allclose(network.predict(IMAGES), expected(PLAIN), atol=1e-5)


def test_an_answer_in_integers_is_taken_before_it_is_rounded(tmp_path):
    """As TFLite's quantised classifiers end: softmax, steps of 1/256, uint8."""
    model = classifier([1, SIDE, SIDE, 3], "probabilities", ov.Type.u8, channels=3)
    zero, one, top = (np.float32(value) for value in (0, 255 / 256, 255))
    end = model.output().get_node().input_value(0)
    steps = ops.convert(ops.fake_quantize(end, zero, one, zero, top, 256), "u8")
    whole = ov.Model([steps], model.get_parameters(), "quantised")
    imported = read(save(whole, tmp_path), None, IMAGENET)
    assert imported.precision == "INT8"
    plain = Normalisation((0.0,) * 3, (1.0,) * 3, "BGR")
    assert np.allclose(answers(imported), expected(plain), atol=1e-5)


@pytest.mark.parametrize("end", ["logits", "probabilities"])
def test_classes_are_picked_by_id(tmp_path, end):
    classes = ClassMap(("n0", "n1", "n2", "n3"), ("n3", "n1", "n2"), "ids.txt")
    path = save(classifier([-1, 3, SIDE, SIDE], end), tmp_path)
    imported = read(path, None, PLAIN, classes=classes)
    picked = expected(PLAIN)[:, [3, 1, 2]]
    assert imported.num_classes == 3
    rows = picked / picked.sum(axis=1, keepdims=True)
    assert np.allclose(answers(imported), rows, atol=1e-5)


def test_an_onnx_file_is_read(tmp_path):
    path = tmp_path / "net.onnx"
    path.write_bytes(onnx_classifier())
    imported = read(path, None, IMAGENET)
    assert (imported.input_size, imported.num_classes, imported.precision) == (SIDE, 4, "FP16")
    assert np.allclose(answers(imported), expected(IMAGENET), atol=1e-5)
