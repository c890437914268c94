"""Answers, those of multi-label sets too, and errors."""

import pickle
from typing import Any

import pytest

from tandem_client import (
    BadImage,
    BadRequest,
    DeadlineExceeded,
    Degraded,
    NotReady,
    Overloaded,
    RetryPolicy,
    ServiceError,
    TandemError,
    Unauthorized,
    Unreachable,
)
from tandem_client.answers import classification_of
from tests.support.scripted_service import Make, answered, refused

ANSWER = {
    "model_set": "scored",
    "predictions": [],
    "members": {"a": {"predictions": []}},
    "agreement": True,
    "degraded": False,
    "threshold": 0.5,
    "request_id": "r",
    "timings_ms": {"total": 1.0, "stages": []},
}


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "not_an_image", BadImage),
        (400, "corrupt_image", BadImage),
        (415, "unsupported_format", BadImage),
        (422, "too_many_pixels", BadImage),
        (413, "too_many_bytes", BadImage),
        (413, "too_many_files", BadRequest),
        (422, "bad_parameter", BadRequest),
        (404, "http", BadRequest),
        (401, "unauthorized", Unauthorized),
        (408, "slow_body", DeadlineExceeded),
        (504, "deadline", DeadlineExceeded),
        (429, "overloaded", Overloaded),
        (503, "not_ready", NotReady),
        (503, "other_set", NotReady),
        (500, "internal", ServiceError),
        (429, "a code of tomorrow", Overloaded),
        (418, "a code of tomorrow", BadRequest),
    ],
)
def test_errors_have_the_services_words(make: Make, status, code, kind):
    client, service, _ = make(
        refused(status, code, "what was wrong"), retry=RetryPolicy(max_attempts=1)
    )
    with pytest.raises(TandemError) as caught:
        client.classify(b"photo")
    error = caught.value
    assert type(error) is kind
    assert (error.message, error.code, error.request_id, error.status) == (
        "what was wrong",
        code,
        "r9",
        status,
    )
    assert str(error) == f"what was wrong ({code}, request r9)"
    assert len(service.requests) == 1


def test_a_degraded_answer_is_one_unless_it_must_not_be(make: Make):
    more: dict[str, Any] = {"degraded": True, "missing_members": {"b": "late"}}
    client, _, _ = make(answered(**more))
    answer = client.classify(b"photo")
    assert (answer.degraded, answer.missing_members) == (True, {"b": "late"})
    client, service, _ = make(answered(**more), allow_degraded=False)
    with pytest.raises(Degraded, match=r"without b \(late\)") as caught:
        client.classify(b"photo")
    assert caught.value.answer == answer
    assert caught.value.request_id == "r1"
    assert len(service.requests) == 1


def test_answers_and_errors_go_through_pickle(make: Make):
    client, _, _ = make(answered(degraded=True, missing_members={"b": "late"}))
    answer = client.classify(b"photo")
    errors = [
        BadImage("m", "not_an_image", "r", 400),
        Overloaded("m", "overloaded", "r", 429, 2.0),
        Unreachable("m", "reset"),
        Degraded("m", answer),
    ]
    for error in errors:
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
    assert pickle.loads(pickle.dumps(answer)) == answer


def test_no_label_is_an_answer():
    answer = classification_of(ANSWER)
    assert (answer.labels, answer.threshold) == ((), 0.5)
    assert answer.members["a"].label is answer.members["a"].probability is None
    for read in (lambda: answer.label, lambda: answer.probability):
        with pytest.raises(LookupError, match=r"no label has a score of 0\.5 or more.*use labels"):
            read()


def test_several_labels():
    listed = [
        {"index": i, "label": text, "probability": 0.9 - i / 10} for i, text in enumerate("ab")
    ]
    member = {"label": "a", "probability": 0.9, "predictions": listed}
    answer = classification_of(ANSWER | {"predictions": listed, "members": {"a": member}})
    assert (answer.labels, answer.label, answer.probability) == (("a", "b"), "a", 0.9)
    assert answer.members["a"].label == "a"


def test_an_answer_of_a_classification_set_without_predictions_is_none():
    told = {key: value for key, value in ANSWER.items() if key != "threshold"}
    with pytest.raises(ValueError, match="without predictions"):
        classification_of(told)
