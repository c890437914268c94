"""Classifiers of every shape become members, or the message says why not."""

import struct
from pathlib import Path

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops
from openvino import opset15
from tiny_networks import tiny_model

from calibration.fold import Normalisation
from calibration.import_network import Imported, import_network
from models.errors import ModelSetError
from models.runtime import CompiledNetwork, RuntimeOptions

SIDE = 8
MATRIX = np.array([[3, -1, 0, 1], [0, 2, -2, 1], [1, 0, 4, -1]], np.float32)  # channel -> class
PLAIN = Normalisation((0.0, 0.0, 0.0), (255.0, 255.0, 255.0), "BGR")
IMAGENET = Normalisation()
IMAGES = np.random.default_rng(7).integers(0, 256, (4, SIDE, SIDE, 3)).astype(np.uint8)


def save(model: ov.Model, folder: Path) -> Path:
    ov.save_model(model, folder / "net.xml", compress_to_fp16=False)
    return folder / "net.xml"


def classifier(
    shape: list[int], end: str = "logits", kind: ov.Type = ov.Type.f32, channels: int = 1
) -> ov.Model:
    """Classes are a matrix times the mean colour; ``channels``: which dimension they are."""
    pixels = ops.parameter(shape, kind, name="pixels")
    sides = [d for d in (1, 2, 3) if d != channels]
    floats = pixels if kind == ov.Type.f32 else ops.convert(pixels, "f32")
    logits = ops.matmul(ops.reduce_mean(floats, np.array(sides), False), MATRIX, False, False)
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


def answers(imported: Imported, images: np.ndarray = IMAGES) -> np.ndarray:
    options = RuntimeOptions(batch_sizes=(len(images),), is_f32_forced=True)
    return CompiledNetwork(imported.model, options).infer(images)


def softmax(logits: np.ndarray) -> np.ndarray:
    raised = np.exp(logits - logits.max(axis=1, keepdims=True))
    return raised / raised.sum(axis=1, keepdims=True)


def expected(how: Normalisation, images: np.ndarray = IMAGES) -> np.ndarray:
    pixels = images if how.color_order == "BGR" else images[..., ::-1]
    floats = (pixels.astype(np.float64) - how.mean) / how.scale
    return softmax(floats.mean(axis=(1, 2)) @ MATRIX)


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
    imported = import_network(path, input_size, IMAGENET)
    assert (imported.input_size, imported.num_classes, imported.precision) == (SIDE, 4, "FP16")
    assert imported.model.input().element_type == ov.Type.u8
    assert imported.model.input().partial_shape == ov.PartialShape([-1, SIDE, SIDE, 3])
    assert imported.model.output().partial_shape == ov.PartialShape([-1, 4])
    assert np.allclose(answers(imported), expected(IMAGENET), atol=1e-5)


@pytest.mark.parametrize("shape", [[-1, 3, -1, -1], [1, 3, SIDE, SIDE]])
@pytest.mark.parametrize("end", ["probabilities", "square"])
def test_the_ending_is_found(tmp_path, shape, end):
    imported = import_network(save(classifier(shape, end), tmp_path), SIDE, IMAGENET)
    assert imported.model.output().partial_shape == ov.PartialShape([-1, 4])
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
    imported = import_network(save(classifier(shape, channels=channels), tmp_path), None, how)
    assert np.allclose(answers(imported), expected(how), atol=1e-5)
    assert not np.allclose(expected(how), expected(Normalisation((1.0,) * 3, (99.0,) * 3)))


@pytest.mark.parametrize("kind", [ov.Type.f16, ov.Type.f64, ov.Type.i32])
def test_other_number_types_are_converted(tmp_path, kind):
    path = save(classifier([-1, 3, SIDE, SIDE], kind=kind), tmp_path)
    found = answers(import_network(path, None, Normalisation((0.0,) * 3, (1.0,) * 3)))
    assert (
        found.argmax(axis=1).tolist()
        == expected(Normalisation((0.0,) * 3, (1.0,) * 3)).argmax(axis=1).tolist()
    )


def test_where_the_pixels_are_matters_not_only_their_mean(tmp_path):
    """A transposed layout has the same mean: this one looks at a single pixel."""
    pixels = ops.parameter([-1, 3, SIDE, SIDE], ov.Type.f32)
    corner = ops.slice(pixels, [0, 1, 2], [3, 2, 3], [1, 1, 1], [1, 2, 3])
    flat = ops.reshape(corner, np.array([0, -1]), special_zero=True)
    imported = import_network(save(ov.Model([flat], [pixels], "one"), tmp_path), None, PLAIN)
    chosen = IMAGES[:, 1, 2, :].astype(np.float64) / 255
    assert np.allclose(answers(imported), softmax(chosen), atol=1e-5)


def test_probabilities_are_told_from_logits_by_looking(tmp_path):
    shape = [-1, 3, SIDE, SIDE]
    same = import_network(save(classifier(shape, "probabilities"), tmp_path), None, PLAIN)
    assert np.allclose(answers(same), expected(PLAIN), atol=1e-5)
    twice = import_network(tmp_path / "net.xml", None, PLAIN, "logits")
    assert np.allclose(answers(twice), softmax(expected(PLAIN)), atol=1e-5)
    kept = import_network(tmp_path / "net.xml", None, PLAIN, "probabilities")
    assert np.allclose(answers(kept), expected(PLAIN), atol=1e-5)


@pytest.mark.parametrize("end", ["logits", "negative"])
def test_logits_are_not_taken_for_probabilities(tmp_path, end):
    path = save(classifier([-1, 3, SIDE, SIDE], end), tmp_path)
    with pytest.raises(ModelSetError, match=r"does not give probabilities.*--outputs logits"):
        import_network(path, None, PLAIN, "probabilities")


def test_a_scale_so_small_that_numbers_overflow_is_noticed(tmp_path):
    path = save(classifier([-1, 3, SIDE, SIDE]), tmp_path)
    with pytest.raises(ModelSetError, match="does not give probabilities"):
        import_network(path, None, Normalisation((0.0,) * 3, (1e-44,) * 3))


def test_a_folded_network_is_taken_as_it_is(tmp_path):
    imported = import_network(save(tiny_model(), tmp_path), None, Normalisation((99.0,) * 3))
    images = np.random.default_rng(3).integers(0, 256, (4, 16, 16, 3)).astype(np.uint8)
    before = CompiledNetwork(tmp_path / "net.xml", RuntimeOptions(batch_sizes=(4,)))
    assert np.allclose(answers(imported, images), before.infer(images), atol=1e-5)
    assert (imported.input_size, imported.num_classes) == (16, 3)


@pytest.mark.parametrize(
    ("shape", "input_size"), [([1, SIDE, SIDE, 3], None), ([-1, -1, -1, 3], SIDE)]
)
@pytest.mark.parametrize("end", ["probabilities", "logits", "square"])
def test_a_folded_network_gets_an_open_batch_a_size_and_softmax_too(
    tmp_path, shape, input_size, end
):
    path = save(classifier(shape, end, ov.Type.u8, channels=3), tmp_path)
    imported = import_network(path, input_size, IMAGENET)
    assert imported.model.input().partial_shape == ov.PartialShape([-1, SIDE, SIDE, 3])
    plain = Normalisation((0.0,) * 3, (1.0,) * 3, "BGR")
    assert np.allclose(answers(imported), expected(plain), atol=1e-5)


def test_a_quantised_network_is_int8(tmp_path):
    pixels = ops.parameter([-1, 3, SIDE, SIDE], ov.Type.f32)
    low, high = np.float32(0), np.float32(1)
    rounded = ops.fake_quantize(pixels, low, high, low, high, 256)
    logits = ops.matmul(ops.reduce_mean(rounded, np.array([2, 3]), False), MATRIX, False, False)
    imported = import_network(save(ov.Model([logits], [pixels], "int8"), tmp_path), None, PLAIN)
    assert imported.precision == "INT8"
    assert np.allclose(answers(imported), expected(PLAIN), atol=1e-2)


@pytest.mark.parametrize(
    ("shape", "end", "says"),
    [
        ([-1, 1, SIDE, SIDE], "logits", "no side is 3 channels: a member takes colour images"),
        ([-1, 4, SIDE, SIDE], "logits", "no side is 3 channels"),
        ([-1, 3, SIDE, 2 * SIDE], "logits", "a member takes squares"),
        ([-1, 3, -1, -1], "logits", "its size is open, so say --input-size"),
        ([-1, 3, SIDE, SIDE], "squeezed", "a shape that changes with the number of images"),
        ([1, 3, SIDE, SIDE], "one row", "its batch size is built in"),
        ([-1, 3, SIDE, SIDE], "flat", r"gives \[\?\]; a member gives probabilities"),
        ([-1, 3, SIDE, SIDE], "map", r"gives \[\?,4,1,2\]; a member gives"),
    ],
)
def test_what_cannot_be_a_member(tmp_path, shape, end, says):
    model = grey(shape) if shape[1] != 3 else classifier(shape, end)
    with pytest.raises(ModelSetError, match=says) as caught:
        import_network(save(model, tmp_path), None, PLAIN)
    assert str(tmp_path / "net.xml") in caught.value.message


def grey(shape: list[int]) -> ov.Model:
    pixels = ops.parameter(shape, ov.Type.f32)
    return ov.Model([ops.reduce_mean(pixels, np.array([2, 3]), False)], [pixels], "grey")


@pytest.mark.parametrize(
    ("shape", "end", "says"),
    [
        ([-1, 3, SIDE, SIDE], "probabilities", r"\[\?,3,8,8\]; a member takes u8 \[\?,H,W,3\]"),
        ([-1, SIDE, 2 * SIDE, 3], "probabilities", "a member takes squares"),
        ([1, SIDE, SIDE, 3], "one row", "its batch size is built in"),
        ([-1, SIDE, SIDE, 3], "squeezed", "a shape that changes"),
        ([-1, -1, -1, 3], "probabilities", "say --input-size"),
    ],
)
def test_what_cannot_be_a_folded_member(tmp_path, shape, end, says):
    channels = 1 if shape[1] == 3 else 3
    path = save(classifier(shape, end, ov.Type.u8, channels), tmp_path)
    with pytest.raises(ModelSetError, match=says):
        import_network(path, None, PLAIN)


@pytest.mark.parametrize("shape", [[-1, 3], [-1, 3, SIDE], [-1, 3, 1, SIDE, SIDE]])
def test_what_is_no_image(tmp_path, shape):
    rows = ops.parameter(shape, ov.Type.f32)
    flat = ops.reshape(rows, np.array([0, -1]), special_zero=True)
    with pytest.raises(ModelSetError, match="a member takes images"):
        import_network(save(ov.Model([flat], [rows], "rows"), tmp_path), None, PLAIN)


def test_a_size_other_than_the_networks_own_is_refused(tmp_path):
    path = save(classifier([-1, 3, SIDE, SIDE]), tmp_path)
    with pytest.raises(ModelSetError, match="takes 8 px, --input-size says 16"):
        import_network(path, 16, PLAIN)


def test_a_size_that_the_layers_cannot_take_is_refused(tmp_path):
    pixels = ops.parameter([-1, 3, -1, -1], ov.Type.f32)
    flat = ops.reshape(pixels, np.array([-1, 3 * SIDE * SIDE]), special_zero=True)
    weights = np.ones((3 * SIDE * SIDE, 4), np.float32)
    model = ov.Model([ops.matmul(flat, weights, False, False)], [pixels], "fixed inside")
    path = save(model, tmp_path)
    with pytest.raises(ModelSetError, match=r"answers \[16,4\] to four images"):
        import_network(path, 16, PLAIN)
    with pytest.raises(ModelSetError, match="cannot take four images"):
        import_network(path, 10, PLAIN)
    assert import_network(path, SIDE, PLAIN).input_size == SIDE


def test_two_outputs_are_named(tmp_path):
    pixels = ops.parameter([-1, 3, SIDE, SIDE], ov.Type.f32)
    logits = ops.reduce_mean(pixels, np.array([2, 3]), False)
    logits.get_output_tensor(0).set_names({"main"})
    other = ops.negative(logits)
    other.get_output_tensor(0).set_names({"auxiliary"})
    path = save(ov.Model([logits, other], [pixels], "two"), tmp_path)
    with pytest.raises(ModelSetError, match=r"has 2 outputs \(main, auxiliary\)"):
        import_network(path, None, PLAIN)


def test_two_inputs_are_counted_though_they_have_no_names(tmp_path):
    both = [ops.parameter([-1, 3, SIDE, SIDE], ov.Type.f32) for _ in range(2)]
    logits = ops.reduce_mean(ops.add(*both), np.array([2, 3]), False)
    path = save(ov.Model([logits], both, "two"), tmp_path)
    with pytest.raises(ModelSetError, match=r"has 2 inputs \(.*, .*\)"):
        import_network(path, None, PLAIN)


@pytest.mark.parametrize("name", ["net.txt", "net.xml", "net.onnx", "net"])
def test_a_text_is_no_network(tmp_path, name):
    (tmp_path / name).write_text("hello\n")
    with pytest.raises(ModelSetError, match=f"cannot read .*/{name}"):
        import_network(tmp_path / name, None, PLAIN)


def test_what_is_not_there(tmp_path):
    with pytest.raises(ModelSetError, match=r"cannot read .*/net\.xml"):
        import_network(tmp_path / "net.xml", None, PLAIN)
    with pytest.raises(ModelSetError, match="cannot read"):
        import_network(tmp_path, None, PLAIN)
    path = save(classifier([-1, 3, SIDE, SIDE]), tmp_path)
    path.with_suffix(".bin").unlink()
    with pytest.raises(ModelSetError, match="bin file"):
        import_network(path, None, PLAIN)


def proto(number: int, *values: int | bytes | str) -> bytes:
    """Encode a field of a protobuf message: numbers as varints, all else with its length."""
    out = b""
    for value in values:
        if isinstance(value, int):
            out += varint(number << 3) + varint(value)
        else:
            data = value.encode() if isinstance(value, str) else value
            out += varint(number << 3 | 2) + varint(len(data)) + data
    return out


def varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)


def onnx_value(name: str, *sides: int | str) -> bytes:
    dims = b"".join(proto(1, proto(1 if isinstance(side, int) else 2, side)) for side in sides)
    return proto(1, name) + proto(2, proto(1, proto(1, 1) + proto(2, dims)))


def onnx_classifier() -> bytes:
    """GlobalAveragePool, Flatten, MatMul: [N,3,8,8] to logits [N,4], as an exporter writes it."""

    def node(kind: str, *ends: str) -> bytes:
        return proto(1, *ends[:-1]) + proto(2, ends[-1]) + proto(4, kind)

    weights = proto(1, 3, 4) + proto(2, 1) + proto(8, "matrix")
    weights += proto(9, struct.pack("<12f", *MATRIX.ravel()))
    nodes = (
        node("GlobalAveragePool", "pixels", "means"),
        node("Flatten", "means", "flat"),
        node("MatMul", "flat", "matrix", "logits"),
    )
    graph = proto(1, *nodes) + proto(2, "classifier") + proto(5, weights)
    graph += proto(11, onnx_value("pixels", "N", 3, SIDE, SIDE))
    graph += proto(12, onnx_value("logits", "N", 4))
    return proto(1, 8) + proto(7, graph) + proto(8, proto(2, 13))


def test_an_onnx_file_is_read(tmp_path):
    path = tmp_path / "net.onnx"
    path.write_bytes(onnx_classifier())
    imported = import_network(path, None, IMAGENET)
    assert (imported.input_size, imported.num_classes, imported.precision) == (SIDE, 4, "FP16")
    assert np.allclose(answers(imported), expected(IMAGENET), atol=1e-5)
