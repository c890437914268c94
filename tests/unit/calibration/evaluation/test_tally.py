"""A classifier's counts against a loop over the images that sorts as serving does."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from calibration.evaluation.tally import SureTally, Tally
from models.accuracy import wilson_interval
from models.ensemble import top_k

BOUNDED = settings(max_examples=100, deadline=None, database=None)
NUM_CLASSES = 7
LABELS = tuple("abcdefg")
# Few different values: rows full of ties.
TIED = st.sampled_from([0.0, 0.125, 0.25, 0.5])


@st.composite
def answers(draw, max_images: int = 12) -> tuple[np.ndarray, np.ndarray]:
    num_images = draw(st.integers(1, max_images))
    elements = draw(st.sampled_from([TIED, st.floats(0, 1, width=32)]))
    rows = draw(hnp.arrays(np.float32, (num_images, NUM_CLASSES), elements=elements))
    truth = draw(hnp.arrays(np.int64, num_images, elements=st.integers(0, NUM_CLASSES - 1)))
    return rows, truth


def tally_of(rows: list[list[float]], truth: list[int]) -> Tally:
    found = Tally(len(rows[0]))
    found.add(np.array(rows, np.float32), np.array(truth, np.int64))
    return found


@BOUNDED
@given(batches=st.lists(answers(), min_size=1, max_size=3))
def test_counts_are_those_of_a_loop_that_sorts_as_serving_does(batches):
    found = Tally(NUM_CLASSES)
    said = [found.add(rows, truth) for rows, truth in batches]
    images = [image for batch in batches for image in zip(*batch, strict=True)]
    ranked = [[p.index for p in top_k(row, LABELS, 5)] for row, _ in images]
    truth = [int(t) for _, t in images]
    first = [order[0] for order in ranked]
    is_right = [a == t for a, t in zip(first, truth, strict=True)]
    assert np.concatenate(said).tolist() == is_right
    assert found.num_images == len(images)
    assert found.num_right == sum(is_right)
    assert found.num_right_top5 == sum(t in order for t, order in zip(truth, ranked, strict=True))
    confusion = np.zeros((NUM_CLASSES, NUM_CLASSES), int)
    for t, a in zip(truth, first, strict=True):
        confusion[t, a] += 1
    assert (found.confusion == confusion).all()


@BOUNDED
@given(batch=answers(), cut=st.integers(0, 12))
def test_how_the_images_are_cut_into_batches_changes_nothing(batch, cut):
    rows, truth = batch
    whole, parts = Tally(NUM_CLASSES), Tally(NUM_CLASSES)
    whole.add(rows, truth)
    for part in (slice(None, cut), slice(cut, None)):
        parts.add(rows[part], truth[part])
    assert parts.score == whole.score
    assert parts.class_accuracy() == whole.class_accuracy()


def test_of_seven_equal_classes_the_first_five_are_the_top_five():
    rows = [[1 / 7] * 7] * 7
    found = tally_of(rows, list(range(7)))
    assert found.num_right_top5 == 5
    assert found.num_right == 1


def test_with_three_classes_the_top_five_are_all():
    assert tally_of([[0.9, 0.1, 0.0]], [2]).score.top5 == 1


def test_confidence_is_that_of_the_answer_right_or_wrong():
    found = tally_of([[0.9, 0.1], [0.2, 0.8]], [0, 0])
    assert found.reliability.confidence.sum() == pytest.approx(1.7)
    assert found.reliability.right.sum() == 1


def test_the_score_is_rounded_and_fit_for_json():
    rows = [[0.9, 0.1], [0.9, 0.1], [0.9, 0.1]]
    score = tally_of(rows, [0, 0, 1]).score
    assert score.top1 == 0.6667
    assert score.top1_interval == tuple(round(v, 4) for v in wilson_interval(2, 3))
    assert score.top5 == 1
    assert score.calibration_error == pytest.approx(0.9 - 2 / 3, abs=1e-4)
    assert json.loads(json.dumps(score.model_dump(mode="json")))["top1"] == 0.6667


def test_all_right_and_all_wrong_are_scores_within_zero_and_one():
    right = tally_of([[1, 0]] * 9, [0] * 9).score
    wrong = tally_of([[1, 0]] * 9, [1] * 9).score
    assert (right.top1, right.top1_interval[1], right.calibration_error) == (1, 1, 0)
    assert (wrong.top1, wrong.top1_interval[0], wrong.calibration_error) == (0, 0, 1)


def test_a_class_without_images_has_no_accuracy():
    found = tally_of([[0.6, 0.3, 0.1], [0.1, 0.8, 0.1], [0.1, 0.8, 0.1]], [0, 0, 2])
    assert found.class_accuracy() == [0.5, None, 0.0]
    assert all(type(v) is float for v in found.class_accuracy() if v is not None)


def test_sure_answers_are_those_from_the_bound_on():
    tally = SureTally(0.8)
    rows = np.array([[0.8, 0.2], [0.79, 0.21], [0.1, 0.9], [0.05, 0.95]], np.float32)
    tally.add(rows, np.array([True, True, False, True]))
    low, high = (round(bound, 4) for bound in wilson_interval(2, 3))
    assert tally.figures() == {"share": 0.75, "right": 0.6667, "right_interval": [low, high]}
