"""Some mutations of an ONNX file; ``tests/load/fuzz.py`` tries many more."""

from contextlib import closing

from tests.support.fuzzing import run
from tests.support.onnx_fuzz import OnnxFuzz

SEED, NUM = 37, 60


def test_onnx_files_are_taken_for_what_they_are_or_refused(tmp_path):
    with closing(OnnxFuzz(tmp_path)) as attempt:
        outcomes = run(attempt, NUM, SEED)
    assert {"model_set", "taken"} <= outcomes.keys() <= {"model_set", "taken", "died"}
    assert outcomes["taken"] > NUM / 20
