"""The rungs that need torch and ONNX Runtime: each answers as OpenVINO's float network does."""

from pathlib import Path

import numpy as np
import pytest
import torch

from calibration.ladder import preparations
from calibration.ladder.engines import (
    check_possible,
    onnx_network,
    openvino_network,
    outcome_of,
    torch_network,
)
from calibration.ladder.preparations import random_module, random_pixels, torch_module
from calibration.ladder.rungs import (
    LadderJob,
    RungNetwork,
    RungOptions,
    SkippedError,
)
from calibration.sets.convert import torchvision_models
from models.errors import ModelSetError
from models.model_set import BUNDLED_DIR, load_model_set

# OpenVINO and the rungs trace with torch.jit, which torch deprecates; NNCF's imports warn as well.
pytestmark = pytest.mark.filterwarnings("ignore")
NAME, SIZE = "squeezenet1_1", 64


def job_of(network: RungNetwork, work: Path) -> LadderJob:
    return LadderJob(network, (), work, {}, seconds=0.2, cores=2)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> LadderJob:
    """A work folder with a set of random weights."""
    work = tmp_path_factory.mktemp("work")
    network = RungNetwork(
        name=NAME,
        size=SIZE,
        num_classes=5,
        model_set=work / f"{NAME}-random",
        torch_source="random",
        is_random=True,
    )
    job = job_of(network, work)
    result = outcome_of(job, "make_set")
    assert result.outcome == "prepared", result.reason
    return job


def softmax(logits: np.ndarray) -> np.ndarray:
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    return shifted / shifted.sum(axis=1, keepdims=True)


def expected(made: LadderJob, pixels: np.ndarray) -> np.ndarray:
    return openvino_network(made, RungOptions(batch=len(pixels))).predict(pixels)


def test_the_set_of_random_weights_is_whole_and_has_int8(made: LadderJob) -> None:
    model_set = load_model_set(str(made.network.model_set))
    assert model_set.problems() == []
    assert set(model_set.manifest.members[0].networks) == {"FP16", "INT8"}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"is_inference_mode": True},
        {"is_inference_mode": True, "is_channels_last": True},
        {"is_inference_mode": True, "mode": "script", "threads": 1, "callers": 2},
    ],
)
def test_pytorch_in_every_way_answers_as_openvino_does(made: LadderJob, change: dict) -> None:
    options = RungOptions(batch=4, **change)
    pixels = random_pixels(4, SIZE, seed=3)
    found = softmax(torch_network(made, options).predict(pixels))
    np.testing.assert_allclose(found, expected(made, pixels), atol=2e-3)
    result = outcome_of(made, "torch", (options,))
    assert result.outcome == "measured", result.reason


def test_torch_compile(made: LadderJob) -> None:
    options = RungOptions(batch=2, is_inference_mode=True, mode="compile")
    result = outcome_of(made, "torch", (options,))
    assert result.outcome in ("measured", "skipped"), result.reason  # without a compiler


def test_bfloat16_only_where_the_cpu_has_it(made: LadderJob, monkeypatch) -> None:
    monkeypatch.setattr("calibration.training.train.has_bf16", lambda: False)
    with pytest.raises(SkippedError, match="avx512_bf16"):
        check_possible(RungOptions(float_type="bf16"))
    monkeypatch.setattr("calibration.training.train.has_bf16", lambda: True)
    network = torch_network(made, RungOptions(float_type="bf16"))
    assert network.predict(random_pixels(1, SIZE)).dtype == np.float32


def test_compiling_needs_a_compiler(monkeypatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(SkippedError, match="C\\+\\+ compiler"):
        check_possible(RungOptions(mode="compile"))


def test_onnx_runtime_answers_as_openvino_does(made: LadderJob) -> None:
    pytest.importorskip("onnxruntime", reason="pip install 'tandem-serve[ladder]'")
    pytest.importorskip("onnxscript", reason="pip install 'tandem-serve[ladder]'")
    exported = outcome_of(made, "export")
    assert exported.outcome == "prepared", exported.reason
    assert not list(made.work.glob("partial*"))
    options, pixels = RungOptions(batch=3), random_pixels(3, SIZE, seed=4)  # traced with two
    found = softmax(onnx_network(made, options).predict(pixels))
    np.testing.assert_allclose(found, expected(made, pixels), atol=2e-3)
    assert outcome_of(made, "onnxruntime", (options,)).outcome == "measured"


def test_the_bundled_resnet50_is_restored_from_its_float_network(tmp_path: Path) -> None:
    network = RungNetwork(
        name="resnet50",
        size=128,
        num_classes=10,
        model_set=BUNDLED_DIR / "imagenette",
        torch_source="float_ir",
    )
    job = job_of(network, tmp_path)
    pixels = random_pixels(2, 128, seed=9)
    found = softmax(torch_network(job, RungOptions(batch=2)).predict(pixels))
    openvino = openvino_network(job, RungOptions(batch=2)).predict(pixels)
    np.testing.assert_allclose(found, openvino, atol=5e-3)


def test_a_network_that_cannot_be_restored_is_skipped(tmp_path: Path) -> None:
    network = RungNetwork(
        name="densenet169",
        size=128,
        num_classes=10,
        model_set=BUNDLED_DIR / "imagenette",
        torch_source="float_ir",
    )
    job = job_of(network, tmp_path)
    with pytest.raises(SkippedError, match="without its PyTorch source"):
        torch_module(job)


@pytest.mark.parametrize("name", ["resnet17", "fcos_resnet50_fpn", "googlenet"])
def test_what_is_no_classification_network_is_refused(made: LadderJob, name: str) -> None:
    with pytest.raises(ModelSetError, match="squeezenet1_1"):
        random_module(made.network.model_copy(update={"name": name}))


def test_a_vision_transformer_runs_quantised_and_as_onnx(made, tmp_path, monkeypatch) -> None:
    """Attention cannot be traced with gradients, and is quantised as NNCF advises."""
    pytest.importorskip("onnxruntime", reason="pip install 'tandem-serve[ladder]'")
    pytest.importorskip("onnxscript", reason="pip install 'tandem-serve[ladder]'")

    def tiny(_: RungNetwork) -> torch.nn.Module:
        torch.manual_seed(1)
        sizes = {"num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32}
        return (
            torchvision_models()
            .VisionTransformer(image_size=32, patch_size=16, num_classes=5, **sizes)
            .eval()
        )

    monkeypatch.setattr(preparations, "random_module", tiny)
    change = {"name": "vit_tiny", "size": 32, "model_set": tmp_path / "vit_tiny-random"}
    network = made.network.model_copy(update=change)
    job = job_of(network, tmp_path)
    for engine in ("make_set", "export"):
        result = outcome_of(job, engine)
        assert result.outcome == "prepared", result.reason
    pixels, options = random_pixels(3, 32), RungOptions(batch=3)
    found = softmax(onnx_network(job, options).predict(pixels))
    np.testing.assert_allclose(found, expected(job, pixels), atol=2e-3)
    int8 = options.model_copy(update={"precision": "INT8", "is_static": True})
    np.testing.assert_allclose(openvino_network(job, int8).predict(pixels), found, atol=0.1)


def test_a_vision_transformer_takes_its_size(made: LadderJob) -> None:
    vit = made.network.model_copy(update={"name": "vit_b_32", "size": 64})
    assert random_module(vit).image_size == 64
