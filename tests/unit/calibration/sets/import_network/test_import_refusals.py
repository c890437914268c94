"""What cannot be a member: the message says why not."""

import contextlib

import numpy as np
import openvino as ov
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openvino import opset13 as ops

from calibration.sets.classes import ClassMap
from calibration.sets.files import check_file
from calibration.sets.fold import Normalisation
from models.errors import ModelSetError
from tests.support.calibration.classifiers import MATRIX, PLAIN, SIDE, classifier, read, save
from tests.support.calibration.onnx_file import onnx_classifier


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
