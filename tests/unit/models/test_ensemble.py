"""The combiner's arithmetic: properties of the average, order and ties of the top k.

What answers list of rows: distributions, and scores of a multi-label set.
"""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from hypothesis.extra.numpy import arrays

from models.ensemble import (
    AnswerRule,
    above,
    average,
    entropy,
    is_sure,
    likeliest,
    margins,
    reaches,
    tempered,
    top_k,
)

BOUNDED = settings(max_examples=100, deadline=None, database=None)
POSITIVE = st.floats(0.01, 100.0)
LABELS = ("a", "b", "c", "d", "e")


@st.composite
def member_rows(draw, max_members: int = 4) -> dict[str, np.ndarray]:
    shape = draw(st.integers(1, 5)), draw(st.integers(2, 6))
    rows = {}
    for index in range(draw(st.integers(1, max_members))):
        raw = draw(hnp.arrays(np.float64, shape, elements=st.floats(0.001, 1.0)))
        rows[f"m{index}"] = (raw / raw.sum(1, keepdims=True)).astype(np.float32)
    return rows


@BOUNDED
@given(rows=member_rows(), weights=st.lists(POSITIVE, min_size=4, max_size=4))
def test_rows_still_sum_to_one_and_stay_between_the_members(rows, weights):
    combined = average(rows, {f"m{i}": w for i, w in enumerate(weights)})
    stacked = np.stack(list(rows.values()))
    assert combined.dtype == np.float32
    assert combined.shape == stacked.shape[1:]
    np.testing.assert_allclose(combined.sum(1), 1, atol=1e-5)
    assert (combined <= stacked.max(0) + 1e-6).all()
    assert (combined >= stacked.min(0) - 1e-6).all()


@BOUNDED
@given(rows=member_rows(max_members=2), factor=POSITIVE)
def test_only_the_ratio_of_the_weights_counts(rows, factor):
    weights = {"m0": 1.0, "m1": 3.0}
    scaled = {name: weight * factor for name, weight in weights.items()}
    np.testing.assert_allclose(average(rows, weights), average(rows, scaled), atol=1e-6)


def test_weights_are_respected():
    rows = {"a": np.array([[1, 0]], np.float32), "b": np.array([[0, 1]], np.float32)}
    np.testing.assert_allclose(average(rows, {"a": 3.0, "b": 1.0}), [[0.75, 0.25]])


def test_an_absent_member_leaves_the_others_their_ratio():
    rows = {"a": np.array([[1, 0]], np.float32), "b": np.array([[0, 1]], np.float32)}
    weights = {"a": 3.0, "b": 1.0, "absent": 96.0}
    np.testing.assert_allclose(average(rows, weights), [[0.75, 0.25]])


def test_nobody_answered():
    with pytest.raises(ValueError, match="nothing to average"):
        average({}, {"a": 1.0})


def test_a_margin_is_what_the_best_two_differ_by():
    rows = np.array([[0.2, 0.7, 0.1], [0.5, 0.0, 0.5], [0.0, 0.0, 1.0]], np.float32)
    np.testing.assert_allclose(margins(rows), [0.5, 0.0, 1.0])
    assert margins(rows).dtype == np.float32


def test_a_row_is_sure_from_the_margin_on_and_never_of_nan():
    rows = np.array([[0.75, 0.25], [0.5, 0.5], [np.nan, 0.5], [0.0, 1.0]], np.float32)
    assert is_sure(rows, 0.5).tolist() == [True, False, False, True]
    assert is_sure(rows, 0.501).tolist() == [False, False, False, True]


@BOUNDED
@given(rows=hnp.arrays(np.float32, (4, 5), elements=st.floats(0, 1, width=32)))
def test_margins_are_those_of_the_top_two(rows):
    firsts = [top_k(row, LABELS, 2) for row in rows]
    expected = [np.float32(a.probability) - np.float32(b.probability) for a, b in firsts]
    np.testing.assert_array_equal(margins(rows), expected)


def test_top_k_is_in_order_with_labels_and_ties_by_index():
    row = np.array([0.1, 0.3, 0.1, 0.4, 0.1], np.float32)
    found = [(p.index, p.label) for p in top_k(row, LABELS, 4)]
    assert found == [(3, "d"), (1, "b"), (0, "a"), (2, "c")]
    assert all(type(p.probability) is float for p in top_k(row, LABELS, 5))  # JSON takes no numpy


@BOUNDED
@given(
    row=hnp.arrays(np.float32, 5, elements=st.floats(0, 1, width=32)),
    k=st.integers(1, 7),
)
def test_top_k_of_any_row(row, k):
    found = top_k(row, LABELS, k)
    assert len(found) == min(k, 5)
    keys = [(-p.probability, p.index) for p in found]
    assert keys == sorted(keys)
    left_out = set(range(5)) - {p.index for p in found}
    assert all(row[i] <= found[-1].probability for i in left_out)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([1.0, 0.0, 0.0, 0.0], 0.0),
        ([0.25, 0.25, 0.25, 0.25], 1.0),
        ([0.5, 0.5, 0.0, 0.0], 0.5),
        ([1.0], 0.0),
    ],
)
def test_entropy_is_a_share_of_the_largest(row, expected):
    found = entropy(np.array(row, np.float32))
    assert found == pytest.approx(expected, abs=1e-6)
    assert type(found) is float


@BOUNDED
@given(row=hnp.arrays(np.float32, 6, elements=st.floats(0.125, 1, width=32)))
def test_entropy_of_any_distribution_is_between_none_and_all(row):
    assert -1e-6 <= entropy(row / row.sum()) <= 1 + 1e-6


@pytest.mark.parametrize("num_classes", [10, 64, 65, 1000])
@pytest.mark.parametrize("k", [1, 5, 10])
def test_the_best_of_few_and_of_many_classes_are_those_of_a_stable_sort(num_classes, k):
    labels = [str(i) for i in range(num_classes)]
    rng = np.random.default_rng(7)
    for distinct in (3, num_classes, 10**6):  # many ties, some, none
        row = (rng.integers(0, distinct, num_classes) / distinct).astype(np.float32)
        expected = np.argsort(-row, kind="stable")[:k]
        assert [p.index for p in top_k(row, labels, k)] == expected.tolist()


@pytest.mark.parametrize("num_classes", [1, 3, 64, 65, 1000])
def test_the_likeliest_is_the_first_of_those_that_tie(num_classes):
    rows = np.random.default_rng(5).integers(0, 5, (50, num_classes)).astype(np.float32)
    assert [likeliest(row) for row in rows] == rows.argmax(axis=1).tolist()
    assert [top_k(row, list(map(str, range(num_classes))), 1)[0].index for row in rows] == [
        likeliest(row) for row in rows
    ]


class Sortless(np.ndarray):
    """A row that refuses what gives up the GIL."""

    def argmax(self, *_: object, **__: object) -> Any:
        raise AssertionError("argmax gives up the GIL")


def test_up_to_64_classes_are_compared_without_giving_up_the_gil():
    few = np.arange(64, dtype=np.float32).view(Sortless)
    assert likeliest(few) == 63
    with pytest.raises(AssertionError, match="argmax"):  # of many it is worth it
        likeliest(np.arange(65, dtype=np.float32).view(Sortless))


def test_rows_of_nan_have_an_order_all_the_same():
    for num_classes in (5, 100):
        row = np.full(num_classes, np.nan, np.float32)
        assert len(top_k(row, [str(i) for i in range(num_classes)], 3)) == 3
        assert 0 <= likeliest(row) < num_classes


@pytest.mark.parametrize("num_classes", [10, 1000])
def test_the_entropy_of_few_and_of_many_classes_is_the_same_formula(num_classes):
    row = np.random.default_rng(3).random(num_classes).astype(np.float32)
    row[0] = 0
    row /= row.sum()
    expected = -np.sum(row[1:] * np.log(row[1:])) / np.log(num_classes)
    assert entropy(row) == pytest.approx(expected, rel=1e-5)


@BOUNDED
@given(rows=member_rows(), temperature=st.floats(0.2, 20))
def test_a_temperature_divides_logits_and_changes_no_order(rows, temperature):
    for row in rows.values():
        exact = np.exp(np.log(row.astype(np.float64)) / temperature)
        found = tempered(row, temperature)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, exact / exact.sum(1, keepdims=True), atol=1e-5)
        assert (np.take_along_axis(found, row.argmax(1)[:, None], 1)[:, 0] == found.max(1)).all()


def test_a_temperature_of_one_costs_nothing():
    rows = np.full((2, 3), 1 / 3, np.float32)
    assert tempered(rows, 1.0) is rows


def test_a_temperature_is_that_of_the_average_that_it_is_given_with():
    rows = {"a": np.array([[0.8, 0.2]], np.float32), "b": np.array([[0.4, 0.6]], np.float32)}
    weights = {"a": 1.0, "b": 1.0}
    mean = average(rows, weights)
    assert average(rows, weights, 0.5) == pytest.approx(tempered(mean, 0.5))
    assert average({"a": rows["a"]}, weights, 0.5) == pytest.approx(tempered(rows["a"], 0.5))


LABELS_ANSWER_RULE = tuple("abcde")
SINGLE, SEVERAL = AnswerRule(LABELS_ANSWER_RULE), AnswerRule(LABELS_ANSWER_RULE, 0.5)


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
        assert listed(AnswerRule(LABELS_ANSWER_RULE, threshold), row(threshold, 0, 0, 0, 0)) == [
            "a"
        ]


@given(arrays(np.float32, 5, elements=st.floats(0, 1, width=32)), st.floats(0.01, 0.99))
def test_the_list_is_what_is_above(scores, threshold):
    found = AnswerRule(LABELS_ANSWER_RULE, threshold).predictions(scores, 5)
    assert {one.index for one in found} == set(np.flatnonzero(above(scores, threshold)))
    assert [p.probability for p in found] == sorted((p.probability for p in found), reverse=True)


def test_an_answer_is_sure_from_its_bound_on():
    assert reaches(row(0.7, 0.3, 0, 0, 0), 0.7) is True  # though float32 rounds it
    assert reaches(row(0.3, 0.699, 0, 0, 0), 0.7) is False
    assert reaches(row(np.nan, 1, 0, 0, 0), 0.7) is False
    assert reaches(row(1, 0, 0, 0, 0), None) is None


def test_an_answer_set_has_every_class_from_its_bound_on_and_always_the_first():
    scores = row(0.3, 0.05, 0.4, 0.2, 0.05)
    for bound, expected in ((0.2, "cad"), (0.21, "ca"), (0.9, "c"), (0.0, "cadbe")):
        found = [one.label for one in SINGLE.answer_set(scores, bound)]
        assert found == list(expected)


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
