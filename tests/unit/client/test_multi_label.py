"""Answers of a multi-label set as the client has them: labels, which may be none."""

import pytest

from tandem_client.answers import classification_of
from tandem_client.exchange import CallOptions

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


def test_the_threshold_goes_with_the_address():
    assert CallOptions().query is None
    assert CallOptions(threshold=0.3).query == {"threshold": 0.3}
    assert CallOptions(top_k=2, threshold=0.3).query == {"top_k": 2, "threshold": 0.3}
