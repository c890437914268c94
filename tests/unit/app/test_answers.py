"""The messages between stages survive the way to another process.

An image's answer as JSON: every field that has a value, under the names that /docs gives.
"""

import pickle
from dataclasses import asdict, fields
from typing import Any

import numpy as np
import orjson
import pytest

from app.answers import (
    Classified,
    Combined,
    Decoded,
    Fault,
    MemberAnswer,
    StageTiming,
    Timings,
    as_json,
)
from models.ensemble import Prediction
from models.errors import TandemError, TooManyPixelsError
from tests.support.cases import cases

STAGES = [
    StageTiming("decode", 0.5, 1.5),
    StageTiming("queue", 2.0, 0.25, "resnet50"),
    StageTiming("infer", 2.25, 9.0, "resnet50", 8),
]


def test_a_fault_is_its_error_as_a_value():
    assert Fault.of(TooManyPixelsError("too large")) == Fault(422, "too_many_pixels", "too large")
    assert Fault.of(TandemError()).message == "TandemError"


def same(a: object, b: object) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    return a == b


@cases(
    "value",
    Fault(400, "not_an_image", "text"),
    Decoded(np.ones((2, 4, 4, 3), np.uint8), {1: Fault(400, "c", "m")}, (0.5, 0.25), "f"),
    MemberAnswer(np.ones((1, 3), np.float32), (0.1,), (0.2,), (1,), "f"),
    Combined([Prediction(0, "a", 0.5)], {"m": [Prediction(0, "a", 0.5)]}, True, 0.5, "f"),
    ids=lambda value: type(value).__name__,
)
def test_what_travels_survives_the_way(value):
    back = pickle.loads(pickle.dumps(value))
    assert type(back) is type(value)
    assert all(same(getattr(back, n), getattr(value, n)) for n in type(value).__annotations__)


def test_an_answer_for_some_of_the_images():
    rows = np.arange(9, dtype=np.float32).reshape(3, 3)
    part = MemberAnswer(rows, (1.0, 2.0, 3.0), (4.0, 5.0, 6.0), (1, 2, 2), "f").rows([2, 0])
    assert np.array_equal(part.probabilities, rows[[2, 0]])
    assert (part.queue_ms, part.infer_ms) == ((3.0, 1.0), (6.0, 4.0))
    assert (part.batch_size, part.model_set_fingerprint) == ((2, 1), "f")


def answer_with(stage: StageTiming) -> Classified:
    of_set: dict[str, Any] = {"model_set": "set", "model_version": "0123456789ab", "members": {}}
    said: dict[str, Any] = {"predictions": [], "agreement": True, "degraded": False}
    return Classified(**of_set, **said, request_id="mine", timings_ms=Timings(3.0, [stage]))


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.stage)
def test_a_stage_has_each_of_its_fields_that_is_given(stage):
    (told,) = orjson.loads(as_json(answer_with(stage)))["timings_ms"]["stages"]
    assert told == {name: value for name, value in asdict(stage).items() if value is not None}


def test_a_field_that_is_added_is_told_too():
    (told,) = orjson.loads(as_json(answer_with(STAGES[-1])))["timings_ms"]["stages"]
    assert list(told) == [field.name for field in fields(StageTiming)]
