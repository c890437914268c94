"""Classifiers of every shape become members that answer as numpy does.

What cannot be a member: the message says why not.

Weights with a zero point, as TFLite keeps them, and the int8 ones that take their place.
"""

import contextlib

import numpy as np
import openvino as ov
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openvino import opset13 as ops

from calibration.sets.files import check_file
from calibration.sets.import_network import make_weights_symmetric
from calibration.sets.input import Normalisation
from calibration.sets.options import ClassMap
from models.errors import ModelSetError
from models.openvino_network import CompiledNetwork, RuntimeOptions
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


@pytest.mark.parametrize("end", ["logits", "negative"])
def test_logits_are_not_taken_for_probabilities(tmp_path, end):
    path = save(classifier([-1, 3, SIDE, SIDE], end), tmp_path)
    with pytest.raises(ModelSetError, match=r"does not give probabilities.*--outputs logits"):
        read(path, None, PLAIN, "probabilities")


def test_a_scale_so_small_that_numbers_overflow_is_noticed(tmp_path):
    path = save(classifier([-1, 3, SIDE, SIDE]), tmp_path)
    with pytest.raises(ModelSetError, match="does not give probabilities"):
        read(path, None, Normalisation((0.0,) * 3, (1e-44,) * 3))


@pytest.mark.parametrize(
    ("shape", "end", "says"),
    [
        ([-1, 1, SIDE, SIDE], "logits", "no side is 3 channels: a member takes colour images"),
        ([-1, 4, SIDE, SIDE], "logits", "no side is 3 channels"),
        ([-1, 3, SIDE, 2 * SIDE], "logits", "a member takes squares"),
        ([-1, 3, -1, -1], "logits", "its size is open, so say --input-size"),
        ([-1, 3, SIDE, SIDE], "squeezed", "a shape that changes with the number of images"),
        ([-1, 3, SIDE, SIDE], "one row", "whatever the number of images"),
        ([-1, 3, SIDE, SIDE], "flat", r"gives \[\?\]; a member gives probabilities"),
        ([-1, 3, SIDE, SIDE], "map", r"gives \[\?,4,1,2\]; a member gives .* are no classifiers"),
    ],
)
def test_what_cannot_be_a_member(tmp_path, shape, end, says):
    model = grey(shape) if shape[1] != 3 else classifier(shape, end)
    with pytest.raises(ModelSetError, match=says) as caught:
        read(save(model, tmp_path), None, PLAIN)
    assert str(tmp_path / "net.xml") in caught.value.message


def grey(shape: list[int]) -> ov.Model:
    pixels = ops.parameter(shape, ov.Type.f32)
    return ov.Model([ops.reduce_mean(pixels, np.array([2, 3]), False)], [pixels], "grey")


@pytest.mark.parametrize(
    ("shape", "end", "says"),
    [
        ([-1, SIDE, 2 * SIDE, 3], "probabilities", "a member takes squares"),
        ([-1, SIDE, SIDE, 3], "one row", "whatever the number of images"),
        ([-1, SIDE, SIDE, 3], "squeezed", "a shape that changes"),
        ([-1, -1, -1, 3], "probabilities", "say --input-size"),
    ],
)
def test_what_cannot_be_a_folded_member(tmp_path, shape, end, says):
    channels = 1 if shape[1] == 3 else 3
    path = save(classifier(shape, end, ov.Type.u8, channels), tmp_path)
    with pytest.raises(ModelSetError, match=says):
        read(path, None, PLAIN)


@pytest.mark.parametrize("shape", [[-1, 3], [-1, 3, SIDE], [-1, 3, 1, SIDE, SIDE]])
def test_what_is_no_image(tmp_path, shape):
    rows = ops.parameter(shape, ov.Type.f32)
    flat = ops.reshape(rows, np.array([0, -1]), special_zero=True)
    with pytest.raises(ModelSetError, match="a member takes images"):
        read(save(ov.Model([flat], [rows], "rows"), tmp_path), None, PLAIN)


def test_a_size_other_than_the_networks_own_is_refused(tmp_path):
    path = save(classifier([-1, 3, SIDE, SIDE]), tmp_path)
    with pytest.raises(ModelSetError, match="takes 8 px, --input-size says 16"):
        read(path, 16, PLAIN)


def test_a_size_that_the_layers_cannot_take_is_refused(tmp_path):
    pixels = ops.parameter([-1, 3, -1, -1], ov.Type.f32)
    flat = ops.reshape(pixels, np.array([-1, 3 * SIDE * SIDE]), special_zero=True)
    weights = np.ones((3 * SIDE * SIDE, 4), np.float32)
    model = ov.Model([ops.matmul(flat, weights, False, False)], [pixels], "fixed inside")
    path = save(model, tmp_path)
    with pytest.raises(ModelSetError, match=r"answers \[16,4\] to four images"):
        read(path, 16, PLAIN)
    with pytest.raises(ModelSetError, match="cannot take four images"):
        read(path, 10, PLAIN)
    assert read(path, SIDE, PLAIN).input_size == SIDE


def test_two_outputs_are_named(tmp_path):
    pixels = ops.parameter([-1, 3, SIDE, SIDE], ov.Type.f32)
    logits = ops.reduce_mean(pixels, np.array([2, 3]), False)
    logits.get_output_tensor(0).set_names({"main"})
    other = ops.negative(logits)
    other.get_output_tensor(0).set_names({"auxiliary"})
    path = save(ov.Model([logits, other], [pixels], "two"), tmp_path)
    with pytest.raises(ModelSetError, match=r"has 2 outputs \(main, auxiliary\)"):
        read(path, None, PLAIN)


def test_two_inputs_are_counted_though_they_have_no_names(tmp_path):
    both = [ops.parameter([-1, 3, SIDE, SIDE], ov.Type.f32) for _ in range(2)]
    logits = ops.reduce_mean(ops.add(*both), np.array([2, 3]), False)
    path = save(ov.Model([logits], both, "two"), tmp_path)
    with pytest.raises(ModelSetError, match=r"has 2 inputs \(.*, .*\)"):
        read(path, None, PLAIN)


@pytest.mark.parametrize("name", ["net.txt", "net.xml", "net.tflite", "net"])
def test_a_text_is_no_network(tmp_path, name):
    (tmp_path / name).write_text("hello\n")
    with pytest.raises(ModelSetError, match=f"cannot read .*/{name}"):
        read(tmp_path / name, None, PLAIN)


def test_a_text_is_no_onnx_and_no_parser_is_asked(tmp_path, capfd):
    (tmp_path / "net.onnx").write_text("hello\n")
    with pytest.raises(ModelSetError, match=r"net\.onnx is no ONNX file, or was cut short"):
        read(tmp_path / "net.onnx", None, PLAIN)
    assert capfd.readouterr() == ("", "")


def test_what_is_not_there(tmp_path):
    with pytest.raises(ModelSetError, match=r"cannot read .*/net\.xml"):
        read(tmp_path / "net.xml", None, PLAIN)
    with pytest.raises(ModelSetError, match="cannot read"):
        read(tmp_path, None, PLAIN)
    path = save(classifier([-1, 3, SIDE, SIDE]), tmp_path)
    path.with_suffix(".bin").unlink()
    with pytest.raises(ModelSetError, match="bin file"):
        read(path, None, PLAIN)


def test_weights_that_are_no_numbers(tmp_path):
    pixels = ops.parameter([-1, 3, SIDE, SIDE], ov.Type.f32)
    weights = MATRIX.copy()
    weights[1, 2] = np.nan
    means = ops.reduce_mean(pixels, np.array([2, 3]), False)
    broken = ops.constant(weights, name="head")
    model = ov.Model([ops.matmul(means, broken, False, False)], [pixels], "broken")
    with pytest.raises(ModelSetError, match=r"the weights .* have NaN"):
        read(save(model, tmp_path), None, PLAIN)


def test_a_multi_label_network_is_none_of_a_classification_set(tmp_path):
    pixels = ops.parameter([-1, 3, SIDE, SIDE], ov.Type.f32)
    scores = ops.sigmoid(ops.reduce_mean(pixels, np.array([2, 3]), False))
    path = save(ov.Model([scores], [pixels], "scores"), tmp_path)
    with pytest.raises(ModelSetError, match=r"ends in a sigmoid.*--task multi_label"):
        read(path, None, PLAIN, task="classification")


def test_a_layout_that_the_shape_contradicts(tmp_path):
    path = save(classifier([-1, 3, SIDE, SIDE]), tmp_path)
    with pytest.raises(ModelSetError, match="as NHWC that is 8 channels, a member takes 3"):
        read(path, None, PLAIN, layout="NHWC")


@pytest.mark.parametrize(
    ("location", "says"),
    [
        ("../weights.bin", r"keeps weights outside of its folder \(\.\./weights\.bin\)"),
        ("/etc/hostname", "keeps weights outside of its folder"),
        ("link.bin", "keeps weights outside of its folder"),
        ("weights.bin", "keeps weights in weights.bin, which is missing"),
    ],
)
def test_weights_that_are_elsewhere(tmp_path, location, says):
    folder = tmp_path / "net"
    folder.mkdir()
    (tmp_path / "weights.bin").write_bytes(bytes(48))
    (folder / "link.bin").symlink_to(tmp_path / "weights.bin")
    path = folder / "net.onnx"
    path.write_bytes(onnx_classifier(location))
    with pytest.raises(ModelSetError, match=says):
        read(path, None, PLAIN)


@given(st.binary(max_size=200))
@settings(derandomize=True, deadline=None)
def test_any_bytes_may_be_searched_for_files(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "any.onnx"
    path.write_bytes(data)
    with contextlib.suppress(ModelSetError):
        check_file(path)


def test_weights_beside_the_file_are_read(tmp_path):
    (tmp_path / "weights.bin").write_bytes(MATRIX.tobytes())
    path = tmp_path / "net.onnx"
    path.write_bytes(onnx_classifier("weights.bin"))
    assert read(path, None, PLAIN).num_classes == 4


def test_classes_that_a_network_lacks_are_named():
    with pytest.raises(ModelSetError, match=r"a\.txt lacks 2 of the set's 3 classes: n8, n9\."):
        ClassMap(("n1", "n2"), ("n1", "n8", "n9"), "a.txt")
    with pytest.raises(ModelSetError, match=r"a\.txt has class ids twice: n1"):
        ClassMap(("n1", "n2", "n1"), ("n2",), "a.txt")


def test_ids_that_are_of_another_network(tmp_path):
    path = save(classifier([-1, 3, SIDE, SIDE]), tmp_path)
    with pytest.raises(ModelSetError, match=r"has 4 classes, a\.txt 2 ids"):
        read(path, None, PLAIN, classes=ClassMap(("n1", "n2"), ("n1",), "a.txt"))


SIDE_SYMMETRIC_WEIGHTS, SCALE = 8, 0.02
IMAGES_SYMMETRIC_WEIGHTS = (
    np.random.default_rng(3)
    .integers(0, 256, (2, SIDE_SYMMETRIC_WEIGHTS, SIDE_SYMMETRIC_WEIGHTS, 3))
    .astype(np.uint8)
)


def network(quantised: np.ndarray, zero_point: int, kind: ov.Type = ov.Type.u8) -> ov.Model:
    """Return a classifier of one 3 x 3 convolution, its weights (3, 3, I, O) as TFLite has them."""
    pixels = ops.parameter([-1, SIDE_SYMMETRIC_WEIGHTS, SIDE_SYMMETRIC_WEIGHTS, 3], ov.Type.u8)
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


def answers_symmetric_weights(model: ov.Model) -> np.ndarray:
    return CompiledNetwork(model, RuntimeOptions(batch_sizes=(2,))).predict(
        IMAGES_SYMMETRIC_WEIGHTS
    )


def stored_weights(model: ov.Model) -> list[np.ndarray]:
    constants = (node for node in model.get_ops() if node.get_type_name() == "Constant")
    return [node.data for node in constants if node.get_element_type() == ov.Type.i8]


def test_weights_that_fit_are_the_same_numbers():
    quantised = weights(13, 253)
    model = network(quantised, 126)
    assert make_weights_symmetric(model) == 1
    (found,) = stored_weights(model)
    np.testing.assert_array_equal(found, (quantised - 126).transpose(3, 2, 0, 1))
    np.testing.assert_allclose(
        answers_symmetric_weights(model),
        answers_symmetric_weights(network(quantised, 126)),
        atol=1e-2,
    )


def test_weights_that_do_not_fit_get_a_scale_of_their_own():
    quantised = weights(0, 255)
    before, after = network(quantised, 20), network(quantised, 20)
    assert make_weights_symmetric(after) == 1
    (found,) = stored_weights(after)
    assert found.max() == 127
    np.testing.assert_allclose(
        answers_symmetric_weights(after), answers_symmetric_weights(before), atol=1e-2
    )


@pytest.mark.parametrize("kind", [ov.Type.i8, ov.Type.f32])
def test_other_weights_stay(kind):
    model = network(weights(-100, 100), 0, kind)
    assert make_weights_symmetric(model) == 0


def test_weights_that_are_all_alike():
    model = network(np.full((3, 3, 3, 16), 9), 9)
    assert make_weights_symmetric(model) == 1
    assert np.isfinite(answers_symmetric_weights(model)).all()
