"""``models add`` of networks that score each class by itself: what is found out, added, refused."""

import numpy as np
import openvino as ov
import pytest

from calibration.sets.options import MemberOptions
from tests.support.calibration.added_sets import added, both, refused, rows_of, sigmoid, text
from tests.support.cases import cases
from tests.support.runtime_files import export_module, float_onnx
from tests.support.scored_sets import BIAS, SIZE, scored_model

GAIN = 6.0
IMAGES = np.random.default_rng(9).integers(0, 256, (4, SIZE, SIZE, 3), np.uint8)
OF_BGR = MemberOptions(mean=(0.0, 0.0, 0.0), scale=(255.0,) * 3, color_order="BGR")
PLAIN, LOGITS, SCORES = (MemberOptions(outputs=o) for o in ("auto", "logits", "probabilities"))


def expected(gain: float = GAIN, bias: float = BIAS) -> np.ndarray:
    """Return the scores of ``IMAGES``; an ONNX or .pt2 of the tests has no bias."""
    return sigmoid(gain * (IMAGES.mean((1, 2)) / 255 - bias))


def network(folder, end="sigmoid", stem="net", gain=GAIN):
    path = folder / f"{stem}.xml"
    ov.save_model(scored_model(gain, end=end), path, compress_to_fp16=False)
    return path


def onnx_network(path, *ends):
    """Write GlobalAveragePool and a gain, and these operators behind it."""
    import onnx
    from onnx import helper

    model = onnx.load_model_from_string(float_onnx(GAIN))
    (output,) = model.graph.output
    for kind in ends:
        model.graph.node.append(helper.make_node(kind, [output.name], [f"{kind}-out"]))
        output.name = f"{kind}-out"
    onnx.save(model, path)
    return path


def torch_network(path, *, has_sigmoid):
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


@pytest.mark.parametrize("end", ["sigmoid", "square"])
def test_a_sigmoid_for_an_ending_makes_a_multi_label_set(tmp_path, end):
    made = added(tmp_path, network(tmp_path, end))
    assert (made.manifest.task, made.manifest.threshold) == ("multi_label", 0.5)
    np.testing.assert_allclose(rows_of(made, IMAGES), expected(), atol=1e-5)
    assert made.golden is not None


def test_the_threshold_is_the_sets(tmp_path):
    assert added(tmp_path, network(tmp_path), threshold=0.3).answer_rule.threshold == 0.3


@both
@pytest.mark.parametrize("ends", [("Sigmoid",), ("Sigmoid", "Identity"), ()])
def test_an_onnx_that_ends_in_a_sigmoid_or_gets_one(tmp_path, runtime, ends):
    path = onnx_network(tmp_path / "net.onnx", *ends)
    task = None if ends else "multi_label"
    made = added(tmp_path, path, runtime=runtime, options=OF_BGR, task=task)
    assert made.manifest.task == "multi_label"
    np.testing.assert_allclose(rows_of(made, IMAGES), expected(bias=0), atol=1e-3)


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit
@pytest.mark.parametrize("has_sigmoid", [True, False])
@pytest.mark.parametrize("suffix", [".pt2", ".ts"])
def test_a_network_of_torch(tmp_path, suffix, has_sigmoid):
    path = torch_network(tmp_path / f"net{suffix}", has_sigmoid=has_sigmoid)
    task = None if has_sigmoid else "multi_label"
    made = added(tmp_path, path, options=OF_BGR, task=task, is_trusted=True)
    assert made.manifest.task == "multi_label"
    np.testing.assert_allclose(rows_of(made, IMAGES), expected(bias=0), atol=1e-3)  # FP16 weights


@both
def test_scores_of_some_classes_stay_as_they_are(tmp_path, runtime):
    made = added(
        tmp_path,
        onnx_network(tmp_path / "net.onnx", "Sigmoid"),
        runtime=runtime,
        options=OF_BGR,
        labels=("has green", "has blue"),
        class_ids=text(tmp_path / "ids.txt", "green", "blue"),
        member_class_ids={"m0": text(tmp_path / "own.txt", "blue", "green", "red")},
    )
    np.testing.assert_allclose(rows_of(made, IMAGES), expected(bias=0)[:, [1, 0]], atol=1e-3)


def test_sigmoids_and_logits_together_want_a_task(tmp_path):
    paths = network(tmp_path), network(tmp_path, "logits", "other")
    refused(r"m0 .*end in a sigmoid.*, m1 .*--task multi_label", tmp_path, *paths)
    made = added(tmp_path, *paths, options=LOGITS, task="multi_label")
    np.testing.assert_allclose(rows_of(made, IMAGES, "m1"), expected(), atol=1e-5)


def test_what_may_be_scores_or_logits_is_to_be_said(tmp_path):
    path = network(tmp_path, "clamp")
    refused(r"may be scores or logits; say --outputs", tmp_path, path, task="multi_label")
    made = added(tmp_path, path, options=SCORES, task="multi_label")
    logits = GAIN * (IMAGES.mean((1, 2)) / 255 - BIAS)
    np.testing.assert_allclose(rows_of(made, IMAGES), np.clip(logits, 0, 1), atol=1e-5)


@cases(
    "end, facts, says",
    ("softmax", {"task": "multi_label"}, "sum to 1, of classes that exclude each other"),
    ("softmax", {"threshold": 0.5}, r"--threshold 0\.5 is of multi-label sets"),
    ("logits", {"task": "multi_label", "options": SCORES}, r"scores: values must be 0\.\.1"),
)
def test_what_is_no_multi_label_set(tmp_path, end, facts, says):
    refused(says, tmp_path, network(tmp_path, end, gain=GAIN * 9), **facts)
