"""What answers list of rows: distributions, and scores of a multi-label set."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from models.answer_rule import AnswerRule, above

LABELS = tuple("abcde")
SINGLE, SEVERAL = AnswerRule(LABELS), AnswerRule(LABELS, 0.5)


def row(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def listed(rule: AnswerRule, scores: np.ndarray, k: int = 5) -> list[str]:
    return [one.label for one in rule.predictions(scores, k)]


def test_a_distribution_lists_as_many_as_are_asked_for():
    assert listed(SINGLE, row(0.1, 0.4, 0.2, 0.3, 0.0), 2) == ["b", "d"]


def test_scores_list_what_is_above_the_threshold_highest_first():
    scores = row(0.9, 0.1, 0.95, 0.5, 0.4999)
    assert listed(SEVERAL, scores) == ["c", "a", "d"]
    assert listed(SEVERAL, scores, 2) == ["c", "a"]
    assert listed(SEVERAL.asked(0.05), scores) == ["c", "a", "d", "e", "b"]
    assert listed(SEVERAL.asked(None), scores) == ["c", "a", "d"]


def test_no_label_may_be_all_there_is():
    assert SEVERAL.predictions(row(0.1, 0.2, 0.0, 0.3, 0.49), 5) == []


def test_a_score_that_is_the_threshold_is_listed_though_float32_rounds_it():
    for threshold in (0.1, 0.3, 0.7, 0.9):
        assert listed(AnswerRule(LABELS, threshold), row(threshold, 0, 0, 0, 0)) == ["a"]


@given(arrays(np.float32, 5, elements=st.floats(0, 1, width=32)), st.floats(0.01, 0.99))
def test_the_list_is_what_is_above(scores, threshold):
    found = AnswerRule(LABELS, threshold).predictions(scores, 5)
    assert {one.index for one in found} == set(np.flatnonzero(above(scores, threshold)))
    assert [p.probability for p in found] == sorted((p.probability for p in found), reverse=True)


def test_an_answer_is_sure_from_the_sets_bound_on():
    rule = AnswerRule(LABELS, sure_from=0.7)
    assert rule.is_sure(row(0.7, 0.3, 0, 0, 0)) is True  # though float32 rounds it
    assert rule.is_sure(row(0.3, 0.699, 0, 0, 0)) is False
    assert rule.is_sure(row(np.nan, 1, 0, 0, 0)) is False
    assert SINGLE.is_sure(row(1, 0, 0, 0, 0)) is None


def test_members_agree_on_the_likeliest_class_or_on_all_labels():
    one, two = row(0.9, 0.8, 0.1, 0, 0), row(0.8, 0.9, 0.2, 0, 0)
    assert not SINGLE.agree([one, two])
    assert SEVERAL.agree([one, two])
    assert SINGLE.agree([one, row(0.9, 0.1, 0, 0, 0)])
    assert not SEVERAL.agree([one, row(0.9, 0.1, 0, 0, 0)])
    assert SEVERAL.agree([row(0, 0, 0, 0, 0), row(0.4, 0, 0, 0, 0)])  # none, both
    assert SEVERAL.agree([one])


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        (row(0.5, 0.5), 1.0),
        (row(0, 1), 0.0),
        (row(0.5, 1), 0.5),
        (row(0.9, 0.9), 0.4689956),
    ],
)
def test_the_entropy_of_scores_is_the_mean_of_each_class(scores, expected):
    assert AnswerRule("ab", 0.5).entropy(scores) == pytest.approx(expected, abs=1e-6)


def test_the_entropy_of_a_distribution_is_shannons():
    assert AnswerRule("ab").entropy(row(0.5, 0.5)) == pytest.approx(1)
    assert AnswerRule("ab").entropy(row(0.9, 0.1)) == pytest.approx(0.4689956)
