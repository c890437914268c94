"""An image's answer as JSON: every field that has a value, under the names that /docs gives."""

from dataclasses import asdict, fields

import orjson
import pytest

from app.responses import Classified, StageTiming, Timings, as_json

STAGES = [
    StageTiming("decode", 0.5, 1.5),
    StageTiming("queue", 2.0, 0.25, "resnet50"),
    StageTiming("infer", 2.25, 9.0, "resnet50", 8),
]


def answer_with(stage: StageTiming) -> Classified:
    return Classified(
        model_set="set",
        model_version="0123456789ab",
        predictions=[],
        members={},
        agreement=True,
        degraded=False,
        request_id="mine",
        timings_ms=Timings(3.0, [stage]),
    )


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.stage)
def test_a_stage_has_each_of_its_fields_that_is_given(stage):
    (told,) = orjson.loads(as_json(answer_with(stage)))["timings_ms"]["stages"]
    assert told == {name: value for name, value in asdict(stage).items() if value is not None}


def test_a_field_that_is_added_is_told_too():
    (told,) = orjson.loads(as_json(answer_with(STAGES[-1])))["timings_ms"]["stages"]
    assert list(told) == [field.name for field in fields(StageTiming)]
