"""The rungs that need torch and ONNX Runtime: each answers as OpenVINO's float network does."""

from pathlib import Path

import numpy as np
import pytest
import torch

from calibration.ladder import engines
from calibration.ladder.engines import random_module, random_pixels, torch_module
from calibration.ladder.rungs import LadderJob, RungNetwork, RungOptions, SkippedError
from calibration.sets.convert import torchvision_models
from models.errors import ModelSetError
from models.model_set import BUNDLED_DIR, load_model_set
from tests.support.cases import cases

# OpenVINO and the rungs trace with torch.jit, which torch deprecates; NNCF's imports warn as well.
pytestmark = pytest.mark.filterwarnings("ignore")
NAME, SIZE = "squeezenet1_1", 64


def job_of(network: RungNetwork, work: Path) -> LadderJob:
    return LadderJob(network, (), work, {}, seconds=0.2, cores=2)


def network_of(model_set, name, size, classes, source):
    return RungNetwork(
        name=name, size=size, num_classes=classes, model_set=model_set, torch_source=source
    )


def bundled(name: str, work: Path) -> LadderJob:
    return job_of(network_of(BUNDLED_DIR / "imagenette", name, 128, 10, "float_ir"), work)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> LadderJob:
    """A work folder with a set of random weights."""
    work = tmp_path_factory.mktemp("work")
    job = job_of(network_of(work / f"{NAME}-random", NAME, SIZE, 5, "random"), work)
    result = engines.outcome_of(job, "make_set")
    assert result.outcome == "prepared", result.reason
    return job


def softmax(logits: np.ndarray) -> np.ndarray:
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    return shifted / shifted.sum(axis=1, keepdims=True)


def expected(made: LadderJob, pixels: np.ndarray) -> np.ndarray:
    return engines.openvino_network(made, RungOptions(batch=len(pixels))).predict(pixels)


def test_the_set_of_random_weights_is_whole_and_has_int8(made: LadderJob) -> None:
    model_set = load_model_set(str(made.network.model_set))
    assert model_set.problems() == []
    assert set(model_set.manifest.members[0].networks) == {"FP16", "INT8"}


@cases(
    "change",
    {},
    {"is_inference_mode": True},
    {"is_inference_mode": True, "is_channels_last": True},
    {"is_inference_mode": True, "mode": "script", "threads": 1, "callers": 2},
)
def test_pytorch_in_every_way_answers_as_openvino_does(made: LadderJob, change: dict) -> None:
    options = RungOptions(batch=4, **change)
    pixels = random_pixels(4, SIZE, seed=3)
    found = softmax(engines.torch_network(made, options).predict(pixels))
    np.testing.assert_allclose(found, expected(made, pixels), atol=2e-3)
    result = engines.outcome_of(made, "torch", (options,))
    assert result.outcome == "measured", result.reason


def test_torch_compile(made: LadderJob) -> None:
    options = RungOptions(batch=2, is_inference_mode=True, mode="compile")
    result = engines.outcome_of(made, "torch", (options,))
    assert result.outcome in ("measured", "skipped"), result.reason  # without a compiler


def test_bfloat16_only_where_the_cpu_has_it(made: LadderJob, monkeypatch) -> None:
    """And compiling where there is a compiler."""
    bf16 = RungOptions(float_type="bf16")
    monkeypatch.setattr("calibration.training.train.has_bf16", lambda: False)
    with pytest.raises(SkippedError, match="avx512_bf16"):
        engines.check_possible(bf16)
    monkeypatch.setattr("calibration.training.train.has_bf16", lambda: True)
    assert engines.torch_network(made, bf16).predict(random_pixels(1, SIZE)).dtype == np.float32
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(SkippedError, match="C\\+\\+ compiler"):
        engines.check_possible(RungOptions(mode="compile"))


@pytest.fixture(scope="module")
def _with_onnx() -> None:
    for name in ("onnxruntime", "onnxscript"):
        pytest.importorskip(name, reason="pip install 'tandem-serve[ladder]'")


@pytest.mark.usefixtures("_with_onnx")
def test_onnx_runtime_answers_as_openvino_does(made: LadderJob) -> None:
    exported = engines.outcome_of(made, "export")
    assert exported.outcome == "prepared", exported.reason
    assert not list(made.work.glob("partial*"))
    options, pixels = RungOptions(batch=3), random_pixels(3, SIZE, seed=4)  # traced with two
    found = softmax(engines.onnx_network(made, options).predict(pixels))
    np.testing.assert_allclose(found, expected(made, pixels), atol=2e-3)
    assert engines.outcome_of(made, "onnxruntime", (options,)).outcome == "measured"


def test_the_bundled_resnet50_is_restored_from_its_float_network(tmp_path: Path) -> None:
    job = bundled("resnet50", tmp_path)
    pixels = random_pixels(2, 128, seed=9)
    rows = softmax(engines.torch_network(job, RungOptions(batch=2)).predict(pixels))
    np.testing.assert_allclose(rows, expected(job, pixels), atol=5e-3)


def test_a_network_that_cannot_be_restored_is_skipped(tmp_path: Path) -> None:
    with pytest.raises(SkippedError, match="without its PyTorch source"):
        torch_module(bundled("densenet169", tmp_path))


@pytest.mark.parametrize("name", ["resnet17", "fcos_resnet50_fpn", "googlenet"])
def test_what_is_no_classification_network_is_refused(made: LadderJob, name: str) -> None:
    with pytest.raises(ModelSetError, match="squeezenet1_1"):
        random_module(made.network.model_copy(update={"name": name}))


@pytest.mark.usefixtures("_with_onnx")
def test_a_vision_transformer_runs_quantised_and_as_onnx(made, tmp_path, monkeypatch) -> None:
    """Attention cannot be traced with gradients, and is quantised as NNCF advises."""

    def tiny(_: RungNetwork) -> torch.nn.Module:
        torch.manual_seed(1)
        sizes = {"image_size": 32, "patch_size": 16, "num_layers": 2, "num_heads": 2}
        widths = {"hidden_dim": 16, "mlp_dim": 32, "num_classes": 5}
        return torchvision_models().VisionTransformer(**sizes, **widths).eval()

    monkeypatch.setattr(engines, "random_module", tiny)
    change = {"name": "vit_tiny", "size": 32, "model_set": tmp_path / "vit_tiny-random"}
    job = job_of(made.network.model_copy(update=change), tmp_path)
    for engine in ("make_set", "export"):
        result = engines.outcome_of(job, engine)
        assert result.outcome == "prepared", result.reason
    pixels, options = random_pixels(3, 32), RungOptions(batch=3)
    found = softmax(engines.onnx_network(job, options).predict(pixels))
    np.testing.assert_allclose(found, expected(job, pixels), atol=2e-3)
    int8 = options.model_copy(update={"precision": "INT8", "is_static": True})
    np.testing.assert_allclose(engines.openvino_network(job, int8).predict(pixels), found, atol=0.1)


def test_a_vision_transformer_takes_its_size(made: LadderJob) -> None:
    vit = made.network.model_copy(update={"name": "vit_b_32", "size": 64})
    assert random_module(vit).image_size == 64
