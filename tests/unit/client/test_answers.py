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
from tandem_client.answers import classification_of, retry_after_s
from tests.support.cases import cases
from tests.support.http_server import classified
from tests.support.scripted_service import answered, refused

SCORED = classified() | {"predictions": [], "members": {"a": {"predictions": []}}, "threshold": 0.5}


def test_no_label_is_an_answer_of_a_multi_label_set_alone_and_it_may_have_several():
    answer = classification_of(SCORED)
    assert (answer.labels, answer.threshold) == ((), 0.5)
    assert answer.members["a"].label is answer.members["a"].probability is None
    for read in (lambda: answer.label, lambda: answer.probability):
        with pytest.raises(LookupError, match=r"no label has a score of 0\.5 or more.*use labels"):
            read()
    with pytest.raises(ValueError, match="without predictions"):
        classification_of(classified() | {"predictions": [], "members": SCORED["members"]})
    listed = [{"index": i, "label": text, "probability": 0.9} for i, text in enumerate("ab")]
    member = {"label": "a", "probability": 0.9, "predictions": listed}
    answer = classification_of(SCORED | {"predictions": listed, "members": {"a": member}})
    assert (answer.labels, answer.label, answer.probability) == (("a", "b"), "a", 0.9)
    assert answer.members["a"].label == "a"


@cases(
    "status, code, kind",
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
    (429, "rate_limited", Overloaded),
    (403, "forbidden", Unauthorized),
    (503, "not_ready", NotReady),
    (503, "other_set", NotReady),
    (500, "internal", ServiceError),
    (429, "a code of tomorrow", Overloaded),
    (418, "a code of tomorrow", BadRequest),
)
def test_errors_have_the_services_words(make, status, code, kind):
    only_once = RetryPolicy(max_attempts=1)
    client, service, _ = make(refused(status, code, "what was wrong"), retry=only_once)
    with pytest.raises(TandemError) as caught:
        client.classify(b"photo")
    error = caught.value
    assert (type(error), error.message, error.code) == (kind, "what was wrong", code)
    assert (error.request_id, error.status) == ("r9", status)
    assert str(error) == f"what was wrong ({code}, request r9)"
    assert len(service.requests) == 1


def test_a_degraded_answer_is_one_unless_it_must_not_be(make):
    more: dict[str, Any] = {"degraded": True, "missing_members": {"b": "late"}}
    client, _, _ = make(answered(**more))
    answer = client.classify(b"photo")
    assert (answer.degraded, answer.missing_members) == (True, {"b": "late"})
    assert pickle.loads(pickle.dumps(answer)) == answer
    client, service, _ = make(answered(**more), allow_degraded=False)
    with pytest.raises(Degraded, match=r"without b \(late\)") as caught:
        client.classify(b"photo")
    assert (caught.value.answer, caught.value.request_id) == (answer, "r1")
    assert len(service.requests) == 1


@cases(
    "error",
    BadImage("m", "not_an_image", "r", 400),
    Overloaded("m", "overloaded", "r", 429, 2.0),
    Unreachable("m", "reset"),
    Degraded("m", classification_of(classified() | {"degraded": True})),
)
def test_errors_go_through_pickle(error):
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


@cases(
    "header, seconds",
    (None, None),
    ("0", 0.0),
    ("7", 7.0),
    (" 12 ", 12.0),
    ("9" * 400, 999999999.0),
    ("Thu, 01 Jan 1970 00:01:00 GMT", 50.0),
    ("Thu, 01 Jan 1970 00:01:00 -0000", 50.0),
    ("Thu, 01 Jan 1970 00:00:01 GMT", 0.0),
    ("", None),
    ("-3", None),
    ("1.5", None),
    ("²", None),
    ("soon", None),
)
def test_retry_after_is_seconds_or_a_date(header, seconds):
    assert retry_after_s(header, now=lambda: 10.0) == seconds
