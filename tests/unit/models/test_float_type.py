"""What floats are computed in: the same on every CPU unless a set asks for bf16."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

from app.settings import Settings
from app.stages import classifier
from calibration import offline
from calibration.commands.models import problems_running
from calibration.evaluation import inference
from models import golden, openvino_network
from models.model_set import ModelSet, load_model_set
from models.openvino_network import CompiledNetwork, RuntimeOptions, read_network
from models.record import Precision
from tests.support.bf16 import rounded_to_bf16
from tests.support.tiny_networks import SIZE, tiny_model, write_tiny_set


@pytest.fixture
def other_default() -> Iterator[None]:
    """A CPU plugin that would by itself compute in something else than f32.

    Which CPUs take bf16 cannot be changed here; that the default is not f32 can.
    """
    core = openvino_network._core()
    core.set_property("CPU", {"EXECUTION_MODE_HINT": "ACCURACY"})
    yield
    core.set_property("CPU", {"EXECUTION_MODE_HINT": "PERFORMANCE"})


@pytest.mark.usefixtures("other_default")
def test_floats_are_f32_whatever_the_plugins_default_is():
    model = tiny_model()
    model.reshape([1, SIZE, SIZE, 3])
    alone = openvino_network._core().compile_model(model, "CPU")
    assert alone.get_property("INFERENCE_PRECISION_HINT").get_type_name() != "f32"
    assert CompiledNetwork(tiny_model(), RuntimeOptions(batch_sizes=(1,))).float_type == "f32"


@pytest.mark.parametrize("float_type", ["f32", "bf16"])
def test_openvino_is_always_told_and_bf16_is_only_where_the_cpu_has_it(float_type):
    options = RuntimeOptions(batch_sizes=(1,), float_type=float_type)
    assert options.properties["INFERENCE_PRECISION_HINT"] == float_type
    can = openvino_network._core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    runs = CompiledNetwork(tiny_model(), options).float_type
    assert runs == (float_type if float_type.upper() in {*can, "F32"} else "f32")


def test_the_rounding_of_these_tests_is_that_of_bf16():
    values = np.random.default_rng(4).normal(0, 30, (1, 1000)).astype(np.float32)
    source = ops.parameter([1, 1000], ov.Type.f32)
    model = rounded_to_bf16(ov.Model([ops.relu(source)], [source], "relu"))
    found = openvino_network._core().compile_model(model, "CPU", RuntimeOptions().properties)(
        [values]
    )[0]
    # To nearest, ties to even: add half of what goes, less one where the last kept bit is 0.
    bits = np.maximum(values, 0).view(np.uint32)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    np.testing.assert_array_equal(found, nearest.astype(np.uint32).view(np.float32))


@pytest.mark.slow  # make test rounds small networks, below
@pytest.mark.parametrize(
    ("member", "precision"), [("resnet50", "FP16"), ("densenet169", "INT8")], ids=str
)
def test_the_bundled_networks_pass_the_golden_check_in_bf16(member, precision):
    """So a set that asks for bf16 need not be made anew on the CPU that has it."""
    model_set = load_model_set("imagenette")
    model = read_network(model_set.network_path(member, precision))
    network = CompiledNetwork(rounded_to_bf16(model), RuntimeOptions(batch_sizes=(8,)))
    assert model_set.golden is not None
    golden.check(model_set.golden, member, precision, network)
    # Answers equal to the fourth decimal would prove that nothing was rounded.
    recorded = model_set.golden.answers[member][precision].rows
    assert golden.answer_of(network).rows != recorded


def serve(model_set: ModelSet, precision: Precision) -> None:
    settings = Settings(model_set=str(model_set.folder), precision=precision, compile_cache=None)
    classifier.Classifier(settings, "sure")


def bound(model_set: ModelSet, precision: Precision) -> None:
    offline.InProcessPipeline(model_set, precision, offline.Setup(1, 1, 1))


def verify(model_set: ModelSet, _: Precision) -> None:
    assert problems_running(model_set) == []


def evaluate(model_set: ModelSet, precision: Precision) -> None:
    inference.Networks(model_set, (precision,))


@pytest.mark.parametrize(
    ("use", "precision", "float_type"),
    [
        (serve, "INT8", "bf16"),
        (serve, "FP16", "bf16"),
        (bound, "INT8", "bf16"),
        (offline.OneImage, "INT8", "bf16"),
        (verify, "INT8", "bf16"),
        (evaluate, "INT8", "bf16"),
        (evaluate, "FP16", "f32"),  # what INT8 is compared with is the same for every set
    ],
)
def test_a_set_is_run_in_the_float_type_it_asks_for(
    tmp_path, monkeypatch, use, precision, float_type
):
    folder = write_tiny_set(tmp_path / "tiny", precision=precision, float_type="bf16")
    asked: list[str] = []

    class Recorded(CompiledNetwork):
        def __init__(self, network: Path | ov.Model, options: RuntimeOptions) -> None:
            asked.append(options.float_type)
            super().__init__(network, options)

    monkeypatch.setattr("models.openvino_network.CompiledNetwork", Recorded)
    use(load_model_set(str(folder)), precision)
    assert set(asked) == {float_type}


def test_sets_that_differ_in_the_float_type_are_not_taken_for_the_same(tmp_path):
    folders = (write_tiny_set(tmp_path / kind, float_type=kind) for kind in ("f32", "bf16"))
    assert len({load_model_set(str(folder)).fingerprint() for folder in folders}) == 2
