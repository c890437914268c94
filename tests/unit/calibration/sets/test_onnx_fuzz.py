"""Some mutations of an ONNX file (decision 0024: of 100,000)."""

from contextlib import closing
from random import Random

from tests.support.fuzzing import run
from tests.support.onnx_fuzz import OnnxFuzz

SEED, NUM = 37, 60


def test_onnx_files_are_taken_for_what_they_are_or_refused(tmp_path):
    with closing(OnnxFuzz(tmp_path)) as attempt:
        outcomes = run(attempt, NUM, SEED)
    assert {what for what in outcomes if not what.startswith("died ")} == {"model_set", "taken"}
    assert outcomes["taken"] > NUM / 20
    # OpenVINO's message quotes it, and its Python binding cannot decode that message.
    with closing(OnnxFuzz(tmp_path)) as attempt:
        assert attempt(Random("917524/1621")) == "model_set"
