"""``models add`` for ONNX Runtime and OpenVINO: what is folded in, and what is refused."""

import zipfile
from functools import partial

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from calibration.sets.options import MemberOptions
from models import machine
from models.machine import MissingExtraError
from tests.support.calibration.added_sets import (
    added,
    both,
    content,
    refused,
    rows_of,
    softmax,
    text,
)
from tests.support.cases import cases
from tests.support.runtime_files import float_onnx, tiny_onnx
from tests.support.script_files import pickled_attack
from tests.support.tiny_networks import SIZE

GAIN = 3.0
IMAGES = np.random.default_rng(5).integers(0, 256, (4, SIZE, SIZE, 3), np.uint8)
MEAN, SCALE = (10.0, 20.0, 30.0), (100.0, 110.0, 120.0)
RGB = MemberOptions(mean=MEAN, scale=SCALE, color_order="RGB")
# What networks answer: the three classes of the float one are red, green and blue here.
OF_FLOATS = softmax(GAIN * ((IMAGES[..., ::-1].astype(np.float64) - MEAN) / SCALE).mean((1, 2)))
OF_PIXELS = softmax(GAIN * IMAGES.mean((1, 2)) / 255)
close = partial(np.testing.assert_allclose, atol=1e-3)  # OpenVINO has the weights in FP16


@pytest.mark.parametrize("batch", ["N", 1], ids=["any batch", "batch 1"])
def test_onnx_for_onnx_runtime(tmp_path, batch):
    path = content(tmp_path / "net.onnx", float_onnx(GAIN, batch))
    made = added(tmp_path, path, runtime="onnxruntime", options=RGB)
    member = made.manifest.member("m0")
    assert (member.networks["FP16"].runtime, made.golden is None) == ("onnxruntime", False)
    assert member.fixed_batch == (1 if batch == 1 else None)
    close(rows_of(made, IMAGES), OF_FLOATS, atol=1e-5)


def of_type(kind: int, *, is_softmax: bool, is_cast: bool) -> bytes:
    """Return the float network as exporters for GPUs write it: weights and ends of a type."""
    model = onnx.load_from_string(float_onnx(GAIN))
    graph, dtype = model.graph, onnx.helper.tensor_dtype_to_np_dtype(kind)
    for tensor in graph.initializer:
        values = numpy_helper.to_array(tensor).astype(dtype)
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    graph.input[0].type.tensor_type.elem_type = graph.output[0].type.tensor_type.elem_type = kind
    if is_softmax:
        graph.node.append(onnx.helper.make_node("Softmax", ["logits"], ["rows"], axis=1))
        graph.output[0].name = "rows"
    if is_cast:
        last = graph.output[0].name
        graph.node.append(onnx.helper.make_node("Cast", [last], ["cast"], to=TensorProto.FLOAT))
        graph.output[0].name = "cast"
        graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT
    return model.SerializeToString()


@pytest.mark.parametrize("is_softmax", [False, True])
@pytest.mark.parametrize("is_cast", [False, True])
@pytest.mark.parametrize("runtime", [None, "onnxruntime"])
def test_a_network_of_float16(tmp_path, runtime, is_cast, is_softmax):
    data = of_type(TensorProto.FLOAT16, is_softmax=is_softmax, is_cast=is_cast)
    made = added(tmp_path, content(tmp_path / "net.onnx", data), runtime=runtime, options=RGB)
    close(rows_of(made, IMAGES), OF_FLOATS, atol=5e-3)


def test_a_network_of_float64_is_for_openvino(tmp_path):
    path = content(
        tmp_path / "net.onnx", of_type(TensorProto.DOUBLE, is_softmax=True, is_cast=False)
    )
    refused("takes double .*float32, float16 or int", tmp_path, path, runtime="onnxruntime")
    close(rows_of(added(tmp_path, path, options=RGB), IMAGES), OF_FLOATS)


def test_class_numbers_are_no_scores(tmp_path):
    model = onnx.load_from_string(float_onnx(GAIN))
    model.graph.node.append(onnx.helper.make_node("ArgMax", ["logits"], ["best"], axis=1))
    best = onnx.helper.make_tensor_value_info("best", TensorProto.INT64, ["N", 1])
    model.graph.output[0].CopyFrom(best)
    path = content(tmp_path / "net.onnx", model.SerializeToString())
    says = r"gives int64 \[\?,1\]; a member gives float32 or float16: export what"
    refused(says, tmp_path, path, runtime="onnxruntime")


@pytest.mark.parametrize("batch", [0, -1])
@pytest.mark.parametrize("runtime", [None, "onnxruntime"])
def test_an_open_batch_that_is_written_as_a_number(tmp_path, batch, runtime):
    """Some exporters do; without a runtime ONNX is for OpenVINO."""
    model = onnx.load_from_string(float_onnx(GAIN, "N"))
    for port in (model.graph.input[0], model.graph.output[0]):
        port.type.tensor_type.shape.dim[0].dim_value = batch
    path = content(tmp_path / "net.onnx", model.SerializeToString())
    made = added(tmp_path, path, runtime=runtime, options=RGB)
    member = made.manifest.member("m0")
    assert (member.fixed_batch, member.networks["FP16"].runtime) == (None, runtime or "openvino")
    close(rows_of(made, IMAGES), OF_FLOATS)


def test_onnx_that_takes_pixels_and_gives_probabilities_is_taken_as_it_is(tmp_path):
    path = content(tmp_path / "net.onnx", tiny_onnx(GAIN))
    close(rows_of(added(tmp_path, path, runtime="onnxruntime"), IMAGES), OF_PIXELS, atol=1e-5)


@both
def test_weights_beside_an_onnx_go_into_the_sets_file(tmp_path, runtime):
    model, path = onnx.load_model_from_string(float_onnx(GAIN)), tmp_path / "net.onnx"
    onnx.save(model, path, save_as_external_data=True, location="w", size_threshold=0)
    made = added(tmp_path, path, runtime=runtime, options=RGB)
    (tmp_path / "w").unlink()
    close(rows_of(made, IMAGES), OF_FLOATS)


@cases(
    "location, says",
    ("../w", r"keeps weights outside of its folder \(\.\./w\)"),
    ("/etc/hostname", "keeps weights outside of its folder"),
    ("link", "keeps weights outside of its folder"),
    ("w", "keeps weights in w, which is missing"),
)
@both
def test_weights_elsewhere(tmp_path, runtime, location, says):
    (folder := tmp_path / "nets").mkdir()
    (folder / "link").symlink_to(content(tmp_path / "w", bytes(12)))
    path = content(folder / "net.onnx", float_onnx(external=location))
    refused(says, folder, path, runtime=runtime)


@both
@pytest.mark.parametrize("is_folded", [False, True], ids=["logits", "probabilities"])
def test_classes_are_mapped_by_their_ids(tmp_path, runtime, is_folded):
    made = added(
        tmp_path,
        content(tmp_path / "net.onnx", tiny_onnx(GAIN) if is_folded else float_onnx(GAIN)),
        runtime=runtime,
        options=MemberOptions() if is_folded else RGB,
        labels=("mostly blue", "mostly green"),
        class_ids=text(tmp_path / "ids.txt", "blue", "green"),
        member_class_ids={"m0": text(tmp_path / "own.txt", "red", "green", "blue")},
    )
    picked = (OF_PIXELS if is_folded else OF_FLOATS)[:, [2, 1]]
    close(rows_of(made, IMAGES), picked / picked.sum(1, keepdims=True))


@cases(
    "name, runtime, says",
    ("net.pkl", "onnxruntime", "a .pkl is a pickle, .* not opened.* torch.export.save"),
    ("net.ckpt", None, "a .ckpt is a pickle"),
    ("net.pt", "onnxruntime", "is no network of PyTorch .*: it was cut short, or is a pickle"),
    ("net.pt", None, "is no network of PyTorch"),
    ("net.tflite", "onnxruntime", "is no file for onnxruntime, which takes ONNX, or .pt2, .pt"),
)
def test_a_file_of_another_kind(tmp_path, name, runtime, says):
    path = content(tmp_path / name, pickled_attack(tmp_path / "it-ran"))
    refused(says, tmp_path, path, runtime=runtime, is_trusted=True)
    assert not (tmp_path / "it-ran").exists()


@cases(
    "data, says",
    (b"nonsense", "is no ONNX file"),
    (tiny_onnx(opset=99), "ONNX Runtime .* cannot load .*[Oo]pset 99"),
    (tiny_onnx(opset=5), "is of opset 5; 7 or later"),
    (tiny_onnx(operator="NoSuch"), "NoSuch"),
    (tiny_onnx(num_outputs=2), r"has 2 outputs \(rows, logits\)"),
    (float_onnx(float("nan")), "the weights gain have NaN"),
    (
        b"\x89HDF\r\n\x1a\n",
        r"of Keras.*load_model\('net.onnx'\).export\('net.onnx', format='onnx'\)",
    ),
    ids=["nonsense", "opset", "old opset", "operator", "outputs", "NaN", "Keras"],
)
def test_onnx_that_is_no_member(tmp_path, data, says):
    refused(says, tmp_path, content(tmp_path / "net.onnx", data), runtime="onnxruntime")


@pytest.mark.parametrize("runtime", [None, "onnxruntime"])
def test_files_of_tensorflow_say_how_to_export_them(tmp_path, runtime):
    with zipfile.ZipFile(path := tmp_path / "net.keras", "w") as made:
        for name in ("metadata.json", "config.json", "model.weights.h5"):
            made.writestr(name, "{}")
    refused(r"of Keras.*load_model\('net.keras'\).export", tmp_path, path, runtime=runtime)
    (folder := tmp_path / "saved").mkdir()
    content(folder / "saved_model.pb", b"x")
    for given in (folder, folder / "saved_model.pb"):
        refused(f"SavedModel.*ovc {folder} --output_model net", tmp_path, given, runtime=runtime)
    refused("is a folder", tmp_path, tmp_path, runtime=runtime)


def test_a_runtime_that_is_not_installed(tmp_path, monkeypatch):
    path = content(tmp_path / "net.onnx", float_onnx())
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    says = r"needs onnxruntime.*'tandem-serve\[onnxruntime\]'"
    with pytest.raises(MissingExtraError, match=says):
        added(tmp_path, path, runtime="onnxruntime")
    assert not (tmp_path / "sets").exists()
