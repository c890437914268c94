"""``models add`` for ONNX Runtime: what is folded in, and what is refused."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from calibration.sets.add_set import NewSet, add_set
from calibration.sets.options import MemberOptions
from models.ensemble import Probabilities
from models.errors import ModelSetError
from models.machine import MissingExtraError
from models.model_set import ModelSet
from models.network import RuntimeOptions, load
from models.record import RuntimeName
from tests.support.runtime_files import float_onnx, tiny_onnx
from tests.support.tiny_networks import LABELS, SIZE

GAIN = 3.0
IMAGES = np.random.default_rng(5).integers(0, 256, (4, SIZE, SIZE, 3), np.uint8)
MEAN, SCALE = (10.0, 20.0, 30.0), (100.0, 110.0, 120.0)
RGB = MemberOptions(mean=MEAN, scale=SCALE, color_order="RGB")


def expected(gain: float = GAIN) -> Probabilities:
    """What the network answers: its three classes are red, green and blue here."""
    floats = (IMAGES[..., ::-1].astype(np.float64) - MEAN) / SCALE
    exponentials = np.exp(gain * floats.mean((1, 2)))
    return (exponentials / exponentials.sum(1, keepdims=True)).astype(np.float32)


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def added(
    tmp_path: Path,
    path: Path,
    runtime: RuntimeName | None,
    options: MemberOptions = RGB,
    **more: Any,
) -> ModelSet:
    labels = tmp_path / "labels.txt"
    labels.write_text("\n".join(LABELS), "utf-8")
    runtimes = {"one": runtime} if runtime else {}
    new = NewSet("made", [("one", path)], labels, options=options, runtimes=runtimes, **more)
    return add_set(new, tmp_path / "sets")


def rows_of(made: ModelSet) -> Probabilities:
    network = load(made.network_path("one", "FP16"), RuntimeOptions(batch_sizes=(1, 4)))
    network.check_fits(SIZE, made.manifest.num_classes)
    return network.predict(IMAGES)


@pytest.mark.parametrize("batch", ["N", 1], ids=["any batch", "batch 1"])
def test_onnx_for_onnx_runtime(tmp_path, batch):
    path = write(tmp_path / "net.onnx", float_onnx(GAIN, batch))
    made = added(tmp_path, path, "onnxruntime")
    assert made.manifest.member("one").networks["FP16"].runtime == "onnxruntime"
    assert made.manifest.member("one").fixed_batch == (1 if batch == 1 else None)
    np.testing.assert_allclose(rows_of(made), expected(), atol=1e-5)
    assert made.golden is not None


@pytest.mark.parametrize("batch", [0, -1])
@pytest.mark.parametrize("runtime", [None, "onnxruntime"])
def test_an_open_batch_that_is_written_as_a_number(tmp_path, batch, runtime):
    """Some exporters do."""
    model = onnx.load_from_string(float_onnx(GAIN, "N"))
    for port in (model.graph.input[0], model.graph.output[0]):
        port.type.tensor_type.shape.dim[0].dim_value = batch
    made = added(tmp_path, write(tmp_path / "net.onnx", model.SerializeToString()), runtime)
    assert made.manifest.member("one").fixed_batch is None
    np.testing.assert_allclose(rows_of(made), expected(), atol=1e-3)


def test_onnx_is_for_openvino_unless_asked_otherwise(tmp_path):
    made = added(tmp_path, write(tmp_path / "net.onnx", float_onnx(GAIN)), None)
    assert made.manifest.member("one").networks["FP16"].runtime == "openvino"
    np.testing.assert_allclose(rows_of(made), expected(), atol=1e-3)


def test_onnx_that_takes_pixels_and_gives_probabilities_is_taken_as_it_is(tmp_path):
    made = added(
        tmp_path, write(tmp_path / "net.onnx", tiny_onnx()), "onnxruntime", MemberOptions()
    )
    exponentials = np.exp(4.0 * IMAGES.mean((1, 2)) / 255)
    np.testing.assert_allclose(
        rows_of(made), exponentials / exponentials.sum(1, keepdims=True), atol=1e-5
    )


def test_weights_beside_an_onnx_go_into_the_sets_file(tmp_path):
    import onnx

    model = onnx.load_model_from_string(float_onnx(GAIN))
    onnx.save(
        model, tmp_path / "net.onnx", save_as_external_data=True, location="w", size_threshold=0
    )
    made = added(tmp_path, tmp_path / "net.onnx", "onnxruntime")
    (tmp_path / "w").unlink()
    np.testing.assert_allclose(rows_of(made), expected(), atol=1e-5)


@pytest.mark.parametrize(
    ("location", "says"), [("../w", "outside of its folder"), ("w", "which is missing")]
)
@pytest.mark.parametrize("runtime", ["openvino", "onnxruntime"])
def test_weights_elsewhere(tmp_path, runtime, location, says):
    path = write(tmp_path / "net.onnx", float_onnx(external=location))
    with pytest.raises(ModelSetError, match=says):
        added(tmp_path, path, runtime)
    assert not (tmp_path / "sets").exists()


def test_classes_are_mapped_by_their_ids(tmp_path):
    ids, own = tmp_path / "ids.txt", tmp_path / "own.txt"
    ids.write_text("blue\ngreen\n", "utf-8")
    own.write_text("red\ngreen\nblue\n", "utf-8")
    labels = tmp_path / "two.txt"
    labels.write_text("mostly blue\nmostly green\n", "utf-8")
    for content in (float_onnx(GAIN), tiny_onnx(GAIN)):
        path = write(tmp_path / "net.onnx", content)
        new = NewSet(
            "made",
            [("one", path)],
            labels,
            class_ids=ids,
            member_class_ids={"one": own},
            options=RGB if content == float_onnx(GAIN) else MemberOptions(),
            runtimes={"one": "onnxruntime"},
        )
        rows = rows_of(add_set(new, tmp_path / "sets", is_replaced=True))
        before = expected() if content == float_onnx(GAIN) else _softmax(IMAGES)
        picked = before[:, [2, 1]]
        np.testing.assert_allclose(rows, picked / picked.sum(1, keepdims=True), atol=1e-5)


def _softmax(images: np.ndarray) -> np.ndarray:
    exponentials = np.exp(GAIN * images.mean((1, 2)) / 255)
    return exponentials / exponentials.sum(1, keepdims=True)


@pytest.mark.parametrize(
    ("name", "runtime", "says"),
    [
        ("net.pkl", "onnxruntime", "a .pkl is a pickle, .* not opened.* torch.export.save"),
        ("net.ckpt", None, "a .ckpt is a pickle"),
        ("net.pt", "onnxruntime", "is no network of PyTorch .*: it was cut short, or is a pickle"),
        ("net.pt", None, "is no network of PyTorch"),
        ("net.tflite", "onnxruntime", "is no file for onnxruntime, which takes ONNX, or .pt2, .pt"),
    ],
)
def test_a_file_of_another_kind(tmp_path, name, runtime, says):
    class Attack:
        def __reduce__(self):
            return Path.touch, (tmp_path / "it-ran",)

    path = write(tmp_path / name, pickle.dumps(Attack()))
    with pytest.raises(ModelSetError, match=says):
        added(tmp_path, path, runtime, is_trusted=True)
    assert not (tmp_path / "it-ran").exists()
    assert not (tmp_path / "sets").exists()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"nonsense", "is no ONNX file"),
        (tiny_onnx(opset=99), "ONNX Runtime .* cannot load .*[Oo]pset 99"),
        (tiny_onnx(opset=5), "is of opset 5; 7 or later"),
        (tiny_onnx(operator="NoSuch"), "NoSuch"),
        (tiny_onnx(num_outputs=2), r"has 2 outputs \(rows, logits\)"),
        (float_onnx(float("nan")), "the weights gain have NaN"),
    ],
    ids=["nonsense", "opset", "old opset", "operator", "outputs", "NaN"],
)
def test_onnx_that_is_no_member(tmp_path, content, says):
    with pytest.raises(ModelSetError, match=says):
        added(tmp_path, write(tmp_path / "net.onnx", content), "onnxruntime")
    assert not (tmp_path / "sets").exists()


def test_a_runtime_that_is_not_installed(tmp_path, monkeypatch):
    from models import machine

    path = write(tmp_path / "net.onnx", float_onnx())
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    with pytest.raises(
        MissingExtraError, match=r"needs onnxruntime.*'tandem-serve\[onnxruntime\]'"
    ):
        added(tmp_path, path, "onnxruntime")
    assert not (tmp_path / "sets").exists()
