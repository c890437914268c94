"""Classifiers of every shape answer as numpy does, or the message says why they are none."""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openvino import opset13 as ops
from openvino import opset15
from PIL import Image

from calibration.sets.files import check_file
from calibration.sets.import_network import Imported, import_network, make_weights_symmetric
from calibration.sets.input import Normalisation
from calibration.sets.options import ClassMap, FileOptions
from models.errors import ModelSetError
from models.openvino_network import CompiledNetwork, RuntimeOptions
from tests.support.calibration.added_sets import softmax
from tests.support.cases import cases

SIDE = 8
MATRIX = np.array([[3, -1, 0, 1], [0, 2, -2, 1], [1, 0, 4, -1]], np.float32)  # channel -> class
PLAIN = Normalisation((0.0, 0.0, 0.0), (255.0, 255.0, 255.0), "BGR")
IMAGENET, GREY = Normalisation(), Normalisation((33.0,) * 3, (70.0,) * 3)
IMAGES = np.random.default_rng(7).integers(0, 256, (4, SIDE, SIDE, 3)).astype(np.uint8)


def save(model: ov.Model, folder: Path) -> Path:
    ov.save_model(model, folder / "net.xml", compress_to_fp16=False)
    return folder / "net.xml"


def classifier(shape, end="logits", kind=ov.Type.f32, channels=1):
    """Classes are a matrix times the mean colour, whose dimension is ``channels``; 0: no such."""
    pixels = ops.parameter(shape, kind, name="pixels")
    floats = pixels if kind == ov.Type.f32 else ops.convert(pixels, "f32")
    if not channels:
        channels, floats = 3, ops.unsqueeze(floats, np.array([3]))
    sides = [d for d in (1, 2, 3) if d != channels]
    means, matrix = ops.reduce_mean(floats, np.array(sides), False), MATRIX
    if (num := floats.get_output_partial_shape(0)[channels]).is_static:
        matrix = MATRIX[: num.get_length()]
    logits = ops.matmul(means, matrix, False, False)
    return ov.Model([ending(logits, end)], [pixels], "classifier")


def ending(logits: ov.Node, end: str) -> ov.Node:
    square = ops.unsqueeze(logits, np.array([2, 3]))
    return {
        "logits": lambda: logits,
        "probabilities": lambda: ops.softmax(logits, 1),
        "square": lambda: square,
        "squeezed": lambda: opset15.squeeze(square),
        "one row": lambda: ops.reshape(logits, np.array([1, 4]), False),
        "flat": lambda: ops.reshape(logits, np.array([-1]), False),
        "map": lambda: ops.concat([square, square], 3),
        "negative": lambda: ops.negative(ops.softmax(logits, 1)),
    }[end]()


def read(path, size, how, outputs="auto", **more):
    """Import the network of a file."""
    return import_network(path, FileOptions(size, how, outputs, **more))


def answers(imported: Imported, images: np.ndarray = IMAGES) -> np.ndarray:
    options = RuntimeOptions(batch_sizes=(len(images),))
    return CompiledNetwork(imported.network, options).predict(images)


def expected(how: Normalisation, images: np.ndarray = IMAGES) -> np.ndarray:
    pixels = images if how.color_order == "BGR" else images[..., ::-1]
    return softmax(((pixels.astype(np.float64) - how.mean) / how.scale).mean(axis=(1, 2)) @ MATRIX)


PLANES, PIXELS = [-1, 3, SIDE, SIDE], [-1, SIDE, SIDE, 3]  # NCHW, NHWC
RAW = Normalisation((0.0,) * 3, (1.0,) * 3)
RAW_BGR = Normalisation((0.0,) * 3, (1.0,) * 3, "BGR")
BROKEN = np.where(MATRIX == -2, np.nan, MATRIX)
USUAL = classifier(PLANES)
NO_PROBABILITIES = "does not give probabilities.*--outputs logits"
TWO_IDS = ClassMap(("n1", "n2"), ("n1",), "a.txt")


def close(imported, wanted, atol=1e-5):
    np.testing.assert_allclose(answers(imported), wanted, atol=atol)


@cases(
    "shape, end, channels, input_size",
    (PLANES, "logits", 1, None),
    (PLANES, "logits", 1, SIDE),
    ([1, 3, SIDE, SIDE], "logits", 1, None),
    ([-1, 3, -1, -1], "logits", 1, SIDE),
    ([-1, 3, -1, -1], "probabilities", 1, SIDE),
    ([-1, 3, -1, -1], "square", 1, SIDE),
    ([1, 3, SIDE, SIDE], "probabilities", 1, SIDE),
    ([1, 3, SIDE, SIDE], "square", 1, SIDE),
    (PIXELS, "logits", 3, None),
    ([-1, -1, -1, 3], "logits", 3, SIDE),
    ([2, SIDE, SIDE, 3], "logits", 3, None),
)
def test_layout_size_and_ending_are_found(tmp_path, shape, end, channels, input_size):
    imported = read(save(classifier(shape, end, channels=channels), tmp_path), input_size, IMAGENET)
    assert (imported.form.size, imported.num_classes, imported.precision) == (SIDE, 4, "FP16")
    assert imported.network.input().element_type == ov.Type.u8
    assert imported.network.input().partial_shape == ov.PartialShape(PIXELS)
    assert imported.network.output().partial_shape == ov.PartialShape([-1, 4])
    close(imported, expected(IMAGENET))


@cases(
    "how",
    PLAIN,
    IMAGENET,
    Normalisation(color_order="BGR"),
    Normalisation((10.0, 120.0, 200.0), (20.0, 50.0, 125.0), "RGB"),
    Normalisation((10.0, 120.0, 200.0), (20.0, 50.0, 125.0), "BGR"),
    Normalisation((0.0, 0.0, 0.0), (255.0, -255.0, 127.5), "RGB"),
)
@pytest.mark.parametrize(("shape", "channels"), [(PLANES, 1), (PIXELS, 3)])
def test_mean_scale_and_colour_order_are_those_of_numpy(tmp_path, how, shape, channels):
    close(read(save(classifier(shape, channels=channels), tmp_path), None, how), expected(how))
    assert not np.allclose(expected(how), expected(Normalisation((1.0,) * 3, (99.0,) * 3)))


@pytest.mark.parametrize("kind", [ov.Type.f16, ov.Type.f64, ov.Type.i32])
def test_other_number_types_are_converted(tmp_path, kind):
    found = answers(read(save(classifier(PLANES, kind=kind), tmp_path), None, RAW))
    assert found.argmax(axis=1).tolist() == expected(RAW).argmax(axis=1).tolist()


def test_where_the_pixels_are_matters_not_only_their_mean(tmp_path):
    """A transposed layout has the same mean: this one looks at a single pixel."""
    pixels = ops.parameter(PLANES, ov.Type.f32)
    corner = ops.slice(pixels, [0, 1, 2], [3, 2, 3], [1, 1, 1], [1, 2, 3])
    flat = ops.reshape(corner, np.array([0, -1]), special_zero=True)
    imported = read(save(ov.Model([flat], [pixels], "one"), tmp_path), None, PLAIN, "logits")
    close(imported, softmax(IMAGES[:, 1, 2, :].astype(np.float64) / 255))


def test_probabilities_are_told_from_logits_by_looking(tmp_path):
    path, once = save(classifier(PLANES, "probabilities"), tmp_path), expected(PLAIN)
    close(read(path, None, PLAIN), once)
    close(read(path, None, PLAIN, "logits"), softmax(once))
    close(read(path, None, PLAIN, "probabilities"), once)


@pytest.mark.parametrize(("shape", "size"), [([1, SIDE, SIDE, 3], None), ([-1, -1, -1, 3], SIDE)])
@pytest.mark.parametrize("end", ["probabilities", "logits", "square"])
def test_a_folded_network_gets_an_open_batch_a_size_and_softmax_too(tmp_path, shape, size, end):
    imported = read(save(classifier(shape, end, ov.Type.u8, channels=3), tmp_path), size, IMAGENET)
    assert imported.network.input().partial_shape == ov.PartialShape(PIXELS)
    close(imported, expected(RAW_BGR))


@pytest.mark.parametrize("order", ["RGB", "BGR"])
@pytest.mark.parametrize(("shape", "channels"), [(PLANES, 1), (PIXELS, 3)])
def test_pixels_are_taken_in_the_networks_own_order_and_layout(tmp_path, order, shape, channels):
    path = save(classifier(shape, kind=ov.Type.u8, channels=channels), tmp_path)
    imported = read(path, None, IMAGENET, pixel_order=order)
    close(imported, expected(Normalisation((0.0,) * 3, (1.0,) * 3, order)))


WIDE = np.random.default_rng(8).integers(0, 256, (4, SIDE, 2 * SIDE, 3)).astype(np.uint8)


def of_grey(how: Normalisation, images: np.ndarray) -> np.ndarray:
    """Return what a classifier of one channel answers to Pillow's grey of these images."""
    grey = np.stack([Image.fromarray(image[..., ::-1]).convert("L") for image in images])
    values = (grey.astype(np.float64) - how.mean[0]) / how.scale[0]
    return softmax(values.mean(axis=(1, 2))[:, None] @ MATRIX[:1])


@cases(
    "shape, channels, size",
    ([-1, 1, SIDE, 2 * SIDE], 1, None),
    ([1, 1, SIDE, 2 * SIDE], 1, None),
    ([-1, SIDE, 2 * SIDE, 1], 3, None),
    ([-1, -1, -1, 1], 3, (SIDE, 2 * SIDE)),
    ([-1, SIDE, 2 * SIDE], 0, None),
    ([1, SIDE, 2 * SIDE], 0, None),
    ([-1, -1, 2 * SIDE], 0, (SIDE, 2 * SIDE)),
)
@pytest.mark.parametrize("kind", [ov.Type.f32, ov.Type.u8, ov.Type.i8])
def test_a_grey_network_gets_pillows_grey(tmp_path, shape, channels, size, kind):
    how = {ov.Type.f32: GREY, ov.Type.u8: RAW, ov.Type.i8: Normalisation((128.0,) * 3, (1.0,) * 3)}
    model = classifier(shape, kind=kind, channels=channels)
    imported = read(save(model, tmp_path), size, how[kind])
    assert (imported.form.size, imported.form.channels) == ((SIDE, 2 * SIDE), 1)
    assert ("grey" in imported.facts, imported.doubt) == (True, None)
    found = CompiledNetwork(imported.network, RuntimeOptions(batch_sizes=(4,))).predict(WIDE)
    np.testing.assert_allclose(found, of_grey(how[kind], WIDE), atol=1e-4)


@cases("shape, channels", ([-1, 3, SIDE, 2 * SIDE], 1), ([-1, SIDE, 2 * SIDE, 3], 3))
def test_a_rectangle_is_taken_as_height_and_width(tmp_path, shape, channels):
    path = save(classifier(shape, channels=channels), tmp_path)
    imported = read(path, None, IMAGENET)
    assert imported.form.size == (SIDE, 2 * SIDE)
    np.testing.assert_allclose(answers(imported, WIDE), expected(IMAGENET, WIDE), atol=1e-5)
    with pytest.raises(ModelSetError, match="it takes 8x16 px, --input-size says 16x8"):
        read(path, (2 * SIDE, SIDE), IMAGENET)


def test_int8_pixels_are_the_usual_ones_less_128(tmp_path):
    path = save(classifier([1, SIDE, SIDE, 3], kind=ov.Type.i8, channels=3), tmp_path)
    less = Normalisation((128.0,) * 3, (1.0,) * 3)
    close(read(path, None, IMAGENET, pixel_order="RGB"), expected(less))


@pytest.mark.parametrize("number", [1, 2])
def test_a_batch_that_only_a_reshape_builds_in_is_freed(tmp_path, number):
    pixels = ops.parameter([number, 3, SIDE, SIDE], ov.Type.f32)
    square = ops.matmul(ops.reduce_mean(pixels, np.array([2, 3]), False), MATRIX, False, False)
    flat = ops.reshape(ops.unsqueeze(square, np.array([2, 3])), np.array([number, 4]), False)
    imported = read(save(ov.Model([flat], [pixels], "reshaped"), tmp_path), None, PLAIN)
    assert imported.fixed_batch is None
    assert imported.network.input().partial_shape[0].is_dynamic
    close(imported, expected(PLAIN))


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
    np.testing.assert_allclose(network.predict(IMAGES), expected(PLAIN), atol=1e-5)


def test_an_answer_in_integers_is_taken_before_it_is_rounded(tmp_path):
    """As TFLite's quantised classifiers end: softmax, steps of 1/256, uint8."""
    model = classifier([1, SIDE, SIDE, 3], "probabilities", ov.Type.u8, channels=3)
    zero, one, top = (np.float32(value) for value in (0, 255 / 256, 255))
    end = model.output().get_node().input_value(0)
    steps = ops.convert(ops.fake_quantize(end, zero, one, zero, top, 256), "u8")
    whole = ov.Model([steps], model.get_parameters(), "quantised")
    imported = read(save(whole, tmp_path), None, IMAGENET)
    assert imported.precision == "INT8"
    close(imported, expected(RAW_BGR))


def of_planes(end, shape=PLANES):
    """Return a model that gives some function of the channels' means."""
    pixels = ops.parameter(shape, ov.Type.f32)
    return ov.Model([end(ops.reduce_mean(pixels, np.array([2, 3]), False))], [pixels], "means")


def folded(shape, end):
    return classifier(shape, end, ov.Type.u8, 1 if shape[1] == 3 else 3)


def flat(*shape: int) -> ov.Model:
    rows = ops.parameter(list(shape), ov.Type.f32)
    return ov.Model([ops.reshape(rows, np.array([0, -1]), special_zero=True)], [rows], "rows")


def two_outputs() -> ov.Model:
    pixels = ops.parameter(PLANES, ov.Type.f32)
    logits = ops.reduce_mean(pixels, np.array([2, 3]), False)
    logits.get_output_tensor(0).set_names({"main"})
    other = ops.negative(logits)
    other.get_output_tensor(0).set_names({"auxiliary"})
    return ov.Model([logits, other], [pixels], "two")


def two_inputs() -> ov.Model:
    both = [ops.parameter(PLANES, ov.Type.f32) for _ in range(2)]
    return ov.Model([ops.reduce_mean(ops.add(*both), np.array([2, 3]), False)], both, "two")


@cases(
    "model, options, says",
    (
        of_planes(lambda m: m, [-1, 1, SIDE, SIDE]),
        {"how": IMAGENET},
        "takes grey pictures of 8 px.*say --mean and --scale",
    ),
    (of_planes(lambda m: m, [-1, 4, SIDE, SIDE]), {}, "no side is 3 or 1 channels"),
    (classifier([-1, 3, -1, -1]), {}, "its size is open, so say --input-size"),
    (classifier(PLANES, "squeezed"), {}, "a shape that changes with the number of images"),
    (classifier(PLANES, "one row"), {}, "whatever the number of images"),
    (classifier(PLANES, "flat"), {}, r"answers \[16,2\] to four images"),
    (classifier(PLANES, "map"), {}, r"gives \[\?,4,1,2\]; a member .* are no classifiers"),
    (folded(PIXELS, "one row"), {}, "whatever the number of images"),
    (folded(PIXELS, "squeezed"), {}, "a shape that changes"),
    (folded([-1, -1, -1, 3], "probabilities"), {}, "say --input-size"),
    (flat(-1, 3), {}, "a member takes images"),
    (flat(-1, 3, SIDE), {}, "a member takes images"),
    (flat(-1, 3, 1, SIDE, SIDE), {}, "a member takes images"),
    (two_outputs(), {}, r"has 2 outputs \(main, auxiliary\)"),
    (two_inputs(), {}, r"has 2 inputs \(.*, .*\)"),  # they have no names
    (USUAL, {"outputs": "probabilities"}, NO_PROBABILITIES),
    (classifier(PLANES, "negative"), {"outputs": "probabilities"}, NO_PROBABILITIES),
    (USUAL, {"how": Normalisation(scale=(1e-44,) * 3)}, "does not give probabilities"),
    (USUAL, {"size": 16}, "takes 8 px, --input-size says 16"),
    (USUAL, {"layout": "NHWC"}, "as NHWC that is 8 channels, a member takes 3"),
    (USUAL, {"classes": TWO_IDS}, r"has 4 classes, a\.txt 2 ids"),
    (
        of_planes(lambda m: ops.matmul(m, ops.constant(BROKEN, name="head"), False, False)),
        {},
        r"the weights .* have NaN",
    ),
    (of_planes(ops.sigmoid), {"task": "classification"}, r"ends in a sigmoid.*--task multi_label"),
)
def test_what_cannot_be_a_member(tmp_path, model, options, says):
    asked: dict[str, Any] = {"size": None, "how": PLAIN} | options
    with pytest.raises(ModelSetError, match=says) as caught:
        read(save(model, tmp_path), **asked)
    assert str(tmp_path / "net.xml") in caught.value.message


def test_a_size_that_the_layers_cannot_take_is_refused(tmp_path):
    pixels = ops.parameter([-1, 3, -1, -1], ov.Type.f32)
    rows = ops.reshape(pixels, np.array([-1, 3 * SIDE * SIDE]), special_zero=True)
    weights = np.ones((3 * SIDE * SIDE, 4), np.float32)
    model = ov.Model([ops.matmul(rows, weights, False, False)], [pixels], "fixed inside")
    path = save(model, tmp_path)
    for size, says in ((16, r"answers \[16,4\] to four images"), (10, "cannot take four images")):
        with pytest.raises(ModelSetError, match=says):
            read(path, size, PLAIN)
    assert read(path, SIDE, PLAIN).form.size == SIDE


@pytest.mark.parametrize("kind", ["i64", "i32", "boolean"])
def test_class_numbers_in_place_of_rows_are_refused(tmp_path, kind):
    pixels = ops.parameter([-1, 3, SIDE, SIDE], ov.Type.f32)
    best = ops.convert(ops.reduce_mean(pixels, np.array([1, 2, 3]), False), kind)
    path = save(ov.Model([best], [pixels], "argmax"), tmp_path)
    with pytest.raises(ModelSetError, match=rf"gives .*{kind}.* \[\?\]; .*\(an argmax\?\)"):
        read(path, None, PLAIN)


@pytest.mark.parametrize("name", ["net.txt", "net.xml", "net.tflite", "net", "net.onnx"])
def test_a_text_is_no_network(tmp_path, capfd, name):
    (tmp_path / name).write_text("hello\n")
    is_onnx = name == "net.onnx"
    says = "net.onnx is no ONNX file, or was cut short" if is_onnx else f"cannot read .*/{name}"
    with pytest.raises(ModelSetError, match=says):
        read(tmp_path / name, None, PLAIN)
    assert not is_onnx or capfd.readouterr() == ("", "")  # no parser is asked


def test_what_is_not_there(tmp_path):
    for path, says in ((tmp_path / "net.xml", "cannot read .*/net.xml"), (tmp_path, "is a folder")):
        with pytest.raises(ModelSetError, match=says):
            read(path, None, PLAIN)
    path = save(USUAL, tmp_path)
    path.with_suffix(".bin").unlink()
    with pytest.raises(ModelSetError, match="bin file"):
        read(path, None, PLAIN)


@given(st.binary(max_size=200))
@settings(derandomize=True, deadline=None)
def test_any_bytes_may_be_searched_for_files(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "any.onnx"
    path.write_bytes(data)
    with contextlib.suppress(ModelSetError):
        check_file(path)


@cases(
    "own, ids, says",
    (("n1", "n2"), ("n1", "n8", "n9"), r"a\.txt lacks 2 of the set's 3 classes: n8, n9\."),
    (("n1", "n2", "n1"), ("n2",), r"a\.txt has class ids twice: n1"),
)
def test_class_ids_that_do_not_fit(own, ids, says):
    with pytest.raises(ModelSetError, match=says):
        ClassMap(own, ids, "a.txt")


def network(quantised: np.ndarray, zero_point: int, kind: ov.Type = ov.Type.u8) -> ov.Model:
    """Return a classifier of one 3 x 3 convolution, its weights (3, 3, I, O) as TFLite has them."""
    pixels = ops.parameter(PIXELS, ov.Type.u8)
    planes = ops.transpose(ops.convert(pixels, "f32"), np.array([0, 3, 1, 2]))
    low, high = np.float32(0), np.float32(255)
    rounded = ops.fake_quantize(planes, low, high, low, high, 256)
    stored = ops.convert(ops.constant(quantised.astype(kind.to_dtype())), "f32")
    shifted = ops.subtract(stored, np.float32(zero_point))
    kernel = ops.transpose(ops.multiply(shifted, np.float32(0.02)), np.array([3, 2, 0, 1]))
    features = ops.convolution(rounded, kernel, [1, 1], [1, 1], [1, 1], [1, 1])
    means = ops.reduce_mean(features, np.array([2, 3]), keep_dims=False)
    return ov.Model([ops.softmax(ops.multiply(means, np.float32(0.01)), 1)], [pixels], "one")


def weights(low: int, high: int) -> np.ndarray:
    return np.random.default_rng(1).integers(low, high + 1, (3, 3, 3, 16))


def rows_of(model: ov.Model) -> np.ndarray:
    return CompiledNetwork(model, RuntimeOptions(batch_sizes=(len(IMAGES),))).predict(IMAGES)


@pytest.mark.parametrize(("low", "high", "zero_point"), [(13, 253, 126), (0, 255, 20)])
def test_weights_become_int8_without_a_zero_point(low, high, zero_point):
    """The same numbers where they fit; or else a scale of their own."""
    quantised = weights(low, high)
    before, after = network(quantised, zero_point), network(quantised, zero_point)
    assert make_weights_symmetric(after) == 1
    constants = (node for node in after.get_ops() if node.get_type_name() == "Constant")
    (stored,) = (node.data for node in constants if node.get_element_type() == ov.Type.i8)
    if high - zero_point <= 127:
        np.testing.assert_array_equal(stored, (quantised - zero_point).transpose(3, 2, 0, 1))
    assert stored.max() == 127
    np.testing.assert_allclose(rows_of(after), rows_of(before), atol=1e-2)


@pytest.mark.parametrize("kind", [ov.Type.i8, ov.Type.f32])
def test_other_weights_stay(kind):
    assert make_weights_symmetric(network(weights(-100, 100), 0, kind)) == 0


def test_weights_that_are_all_alike():
    model = network(np.full((3, 3, 3, 16), 9), 9)
    assert make_weights_symmetric(model) == 1
    assert np.isfinite(rows_of(model)).all()
