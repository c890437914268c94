"""``models add`` for ONNX Runtime and OpenVINO: what is folded in, and what is refused."""

from functools import partial

import numpy as np
import onnx
import pytest

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
    ids=["nonsense", "opset", "old opset", "operator", "outputs", "NaN"],
)
def test_onnx_that_is_no_member(tmp_path, data, says):
    refused(says, tmp_path, content(tmp_path / "net.onnx", data), runtime="onnxruntime")


def test_a_runtime_that_is_not_installed(tmp_path, monkeypatch):
    path = content(tmp_path / "net.onnx", float_onnx())
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    says = r"needs onnxruntime.*'tandem-serve\[onnxruntime\]'"
    with pytest.raises(MissingExtraError, match=says):
        added(tmp_path, path, runtime="onnxruntime")
    assert not (tmp_path / "sets").exists()
