"""``models add`` of networks that score each class by itself: what is found out, added, refused."""

from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest

from calibration.sets.add_set import NewSet, add_set
from calibration.sets.options import MemberOptions
from models.ensemble import Probabilities
from models.errors import ModelSetError
from models.model_set import ModelSet
from models.network import RuntimeOptions, load
from models.record import RuntimeName, Task
from tests.support.runtime_files import export_module, float_onnx
from tests.support.scored_sets import BIAS, LABELS, SIZE, scored_model

GAIN = 6.0
IMAGES = np.random.default_rng(9).integers(0, 256, (4, SIZE, SIZE, 3), np.uint8)
OF_BGR = MemberOptions(mean=(0.0, 0.0, 0.0), scale=(255.0,) * 3, color_order="BGR")


def sigmoid(logits: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logits))


def expected(gain: float = GAIN, bias: float = BIAS) -> np.ndarray:
    """Return the scores of ``IMAGES``; an ONNX or .pt2 of the tests has no bias."""
    return sigmoid(gain * (IMAGES.mean((1, 2)) / 255 - bias))


def network(folder: Path, end: str = "sigmoid", stem: str = "net") -> Path:
    path = folder / f"{stem}.xml"
    ov.save_model(scored_model(GAIN, end=end), path, compress_to_fp16=False)
    return path


def onnx_network(path: Path, *, has_sigmoid: bool, is_square: bool = False) -> Path:
    """Write GlobalAveragePool and a gain, with or without a sigmoid behind it."""
    import onnx
    from onnx import helper

    model = onnx.load_model_from_string(float_onnx(GAIN))
    (output,) = model.graph.output
    last = output.name
    for kind in ("Sigmoid",) * has_sigmoid + ("Identity",) * is_square:
        model.graph.node.append(helper.make_node(kind, [last], [f"{kind}-out"]))
        last = f"{kind}-out"
    output.name = last
    onnx.save(model, path)
    return path


def torch_network(path: Path, *, has_sigmoid: bool) -> Path:
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = torch.nn.Parameter(torch.full((3,), GAIN))

        def forward(self, image):
            logits = image.mean((2, 3)) * self.gain
            return torch.sigmoid(logits).reshape(-1, 3) if has_sigmoid else logits

    example = torch.zeros(2, 3, SIZE, SIZE)
    if path.suffix == ".ts":
        torch.jit.save(torch.jit.trace(Net(), example), str(path))
    else:
        export_module(Net(), path, example)
    return path


def added(
    folder: Path,
    *paths: Path,
    task: Task | None = None,
    runtime: RuntimeName | None = None,
    **more: Any,
) -> ModelSet:
    labels = folder / "labels.txt"
    labels.write_text("\n".join(LABELS), "utf-8")
    members = [(f"m{number}", path) for number, path in enumerate(paths)]
    runtimes = {name: runtime for name, _ in members} if runtime else {}
    options = {"options": OF_BGR} | more
    new = NewSet("made", members, labels, runtimes=runtimes, task=task, **options)
    return add_set(new, folder / "sets")


def rows_of(made: ModelSet, member: str = "m0") -> Probabilities:
    found = load(made.network_path(member, "FP16"), RuntimeOptions(batch_sizes=(1, 4)))
    found.check_fits(SIZE, made.manifest.num_classes)
    return found.predict(IMAGES)


@pytest.mark.parametrize("end", ["sigmoid", "square"])
def test_a_sigmoid_for_an_ending_makes_a_multi_label_set(tmp_path, end):
    made = added(tmp_path, network(tmp_path, end), options=MemberOptions())
    assert (made.manifest.task, made.manifest.threshold) == ("multi_label", 0.5)
    np.testing.assert_allclose(rows_of(made), expected(), atol=1e-5)
    assert made.golden is not None


def test_the_threshold_is_the_sets(tmp_path):
    made = added(tmp_path, network(tmp_path), options=MemberOptions(), threshold=0.3)
    assert made.answer_rule.threshold == 0.3


@pytest.mark.parametrize("runtime", ["openvino", "onnxruntime"])
@pytest.mark.parametrize("is_square", [False, True])
def test_an_onnx_that_ends_in_a_sigmoid(tmp_path, runtime, is_square):
    path = onnx_network(tmp_path / "net.onnx", has_sigmoid=True, is_square=is_square)
    made = added(tmp_path, path, runtime=runtime)
    assert made.manifest.task == "multi_label"
    np.testing.assert_allclose(rows_of(made), expected(bias=0), atol=1e-3)


@pytest.mark.parametrize("runtime", ["openvino", "onnxruntime"])
def test_logits_get_a_sigmoid(tmp_path, runtime):
    path = onnx_network(tmp_path / "net.onnx", has_sigmoid=False)
    made = added(tmp_path, path, runtime=runtime, task="multi_label")
    np.testing.assert_allclose(rows_of(made), expected(bias=0), atol=1e-3)


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit
@pytest.mark.parametrize("has_sigmoid", [True, False])
@pytest.mark.parametrize("suffix", [".pt2", ".ts"])
def test_a_network_of_torch(tmp_path, suffix, has_sigmoid):
    path = torch_network(tmp_path / f"net{suffix}", has_sigmoid=has_sigmoid)
    made = added(tmp_path, path, task=None if has_sigmoid else "multi_label", is_trusted=True)
    assert made.manifest.task == "multi_label"
    np.testing.assert_allclose(rows_of(made), expected(bias=0), atol=1e-3)  # weights in FP16


@pytest.mark.parametrize("runtime", ["openvino", "onnxruntime"])
def test_scores_of_some_classes_stay_as_they_are(tmp_path, runtime):
    ids, own = tmp_path / "ids.txt", tmp_path / "own.txt"
    ids.write_text("green\nblue\n", "utf-8")
    own.write_text("blue\ngreen\nred\n", "utf-8")
    labels = tmp_path / "two.txt"
    labels.write_text("has green\nhas blue\n", "utf-8")
    new = NewSet(
        "made",
        [("m0", onnx_network(tmp_path / "net.onnx", has_sigmoid=True))],
        labels,
        class_ids=ids,
        member_class_ids={"m0": own},
        options=OF_BGR,
        runtimes={"m0": runtime},
    )
    rows = rows_of(add_set(new, tmp_path / "sets"))
    np.testing.assert_allclose(rows, expected(bias=0)[:, [1, 0]], atol=1e-3)


def test_sigmoids_and_logits_together_want_a_task(tmp_path):
    paths = network(tmp_path), network(tmp_path, "logits", "other")
    with pytest.raises(ModelSetError, match=r"m0 .*end in a sigmoid.*, m1 .*--task multi_label"):
        added(tmp_path, *paths, options=MemberOptions())
    assert not (tmp_path / "sets").exists()
    made = added(tmp_path, *paths, options=MemberOptions(outputs="logits"), task="multi_label")
    np.testing.assert_allclose(rows_of(made, "m1"), expected(), atol=1e-5)


def test_a_softmax_is_no_member_of_a_multi_label_set(tmp_path):
    with pytest.raises(ModelSetError, match=r"sum to 1, of classes that exclude each other"):
        added(tmp_path, network(tmp_path, "softmax"), options=MemberOptions(), task="multi_label")


def test_what_may_be_scores_or_logits_is_to_be_said(tmp_path):
    path = network(tmp_path, "clamp")
    with pytest.raises(ModelSetError, match=r"may be scores or logits; say --outputs"):
        added(tmp_path, path, options=MemberOptions(), task="multi_label")
    made = added(tmp_path, path, options=MemberOptions(outputs="probabilities"), task="multi_label")
    logits = GAIN * (IMAGES.mean((1, 2)) / 255 - BIAS)
    np.testing.assert_allclose(rows_of(made), np.clip(logits, 0, 1), atol=1e-5)


def test_what_is_said_to_be_scores_and_is_none(tmp_path):
    model = scored_model(GAIN * 9, end="logits")
    ov.save_model(model, tmp_path / "net.xml", compress_to_fp16=False)
    options = MemberOptions(outputs="probabilities")
    with pytest.raises(ModelSetError, match=r"does not give scores: values must be 0\.\.1"):
        added(tmp_path, tmp_path / "net.xml", options=options, task="multi_label")


def test_a_threshold_of_a_classification_set(tmp_path):
    path = network(tmp_path, "softmax")
    with pytest.raises(ModelSetError, match=r"--threshold 0\.5 is of multi-label sets"):
        added(tmp_path, path, options=MemberOptions(), threshold=0.5)
