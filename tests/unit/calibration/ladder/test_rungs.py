"""The ladder's order, and what its rungs try."""

import pytest

from calibration.ladder.rung import RungOptions
from calibration.ladder.rungs import SERVICE, rungs

ORDER = [
    "eager",
    "inference_mode",
    "batches",
    "threads",
    "channels_last",
    "torchscript",
    "compile",
    "torch_bf16",
    "onnxruntime",
    "openvino",
    "latency",
    "throughput",
    "fixed_shapes",
    "streams",
    "low_precision",
    "int8",
    "ensemble",
    "cascade",
    SERVICE,
]


def test_from_eager_pytorch_to_the_service():
    assert [rung.name for rung in rungs(2, 0.5)] == ORDER


@pytest.mark.parametrize("cores", [1, 2, 3, 64])
def test_every_choice_is_valid_and_uses_no_more_than_the_cores(cores):
    for rung in rungs(cores, 0.5):
        choices = rung.choices(RungOptions())
        assert len(set(choices)) == len(choices) > 0
        for options in choices:
            RungOptions.model_validate(options.model_dump())  # model_copy checks nothing
            assert (options.threads or 1) * options.callers <= cores


def test_a_rung_changes_its_own_and_keeps_the_rest():
    base = RungOptions(batch=16, is_inference_mode=True)
    (channels_last,) = (r for r in rungs(2, 0.5) if r.name == "channels_last")
    (options,) = channels_last.choices(base)
    assert options == base.model_copy(update={"is_channels_last": True})


def test_int8_tries_the_float_type_before_it_and_f32():
    (int8,) = (r for r in rungs(2, 0.5) if r.name == "int8")
    assert {o.float_type for o in int8.choices(RungOptions(float_type="bf16"))} == {"bf16", "f32"}
    assert {o.precision for o in int8.choices(RungOptions())} == {"INT8"}
