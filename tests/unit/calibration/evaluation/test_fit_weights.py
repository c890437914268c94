"""Fitted weights: the one maximum of the likelihood, and a judge that saw none of its images."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from calibration.evaluation.fit_weights import FLOOR, FittedWeights, WeightFit, fit_mixture
from calibration.evaluation.inference import PredictedBatch
from models.accuracy import ENSEMBLE

BOUNDED = settings(max_examples=40, deadline=None, database=None)
# The third member is worse by little: its weight goes to zero as one over the number of steps.
NEARLY_ALIKE = np.full((10, 3), 0.5859375)
NEARLY_ALIKE[2, 2], NEARLY_ALIKE[7, :2] = 0.484375, 0.5
STEPS = np.arange(0, 1.0001, 0.05)


def likelihood(of_truth: np.ndarray, weights: np.ndarray) -> float:
    return float(np.log(np.maximum(of_truth, FLOOR) @ weights).mean())


def grid(num_members: int) -> list[np.ndarray]:
    """Every way to give the members multiples of 0.05 that sum to one."""
    if num_members == 1:
        return [np.ones(1)]
    points = np.stack(np.meshgrid(*[STEPS] * (num_members - 1)), -1).reshape(-1, num_members - 1)
    points = points[points.sum(1) < 1 + 1e-9]
    return list(np.hstack([points, np.maximum(1 - points.sum(1, keepdims=True), 0)]))


@st.composite
def probabilities_of_truth(draw) -> np.ndarray:
    shape = draw(st.integers(1, 30)), draw(st.integers(1, 3))
    return draw(hnp.arrays(np.float64, shape, elements=st.floats(0.01, 1)))


def batch(rows: dict[str, list[list[float]]], truth: list[int], precision="INT8") -> PredictedBatch:
    answers = {name: np.array(row, np.float32) for name, row in rows.items()}
    return PredictedBatch([], [], np.array(truth, np.int64), {precision: answers}, [])


def told(right: list[bool], sure: float = 0.9) -> list[list[float]]:
    """Two classes, the first is true: rows of a member that is right where ``right`` says."""
    return [[sure, 1 - sure] if is_right else [1 - sure, sure] for is_right in right]


def fit_of(
    good: list[bool], bad: list[bool], num_to_fit: int, times: int = 1, sure: float = 0.95
) -> WeightFit:
    """Feed a batch again and again: a is right where ``good`` says; b, where ``bad``, and surer."""
    fit = WeightFit("INT8", num_to_fit)
    for _ in range(times):
        fit.add(batch({"a": told(good), "b": told(bad, sure)}, [0] * len(good)))
    return fit


def judged(fit: WeightFit) -> FittedWeights:
    found = fit.result()
    assert found is not None
    return found


@BOUNDED
@given(of_truth=probabilities_of_truth())
def test_no_weights_of_a_grid_are_likelier(of_truth):
    weights = fit_mixture(of_truth)
    assert weights.shape == (of_truth.shape[1],)
    assert (weights >= 0).all()
    assert weights.sum() == pytest.approx(1)
    best = max(likelihood(of_truth, w) for w in grid(of_truth.shape[1]))
    # From equal weights, expectation-maximisation is within log(M) / steps of the best.
    assert likelihood(of_truth, weights) >= best - np.log(of_truth.shape[1]) / 2000 - 1e-9


@BOUNDED
@given(of_truth=probabilities_of_truth())
@example(of_truth=NEARLY_ALIKE)  # over 20,000 steps
def test_every_step_climbs_and_the_last_one_is_a_fixed_point(of_truth):
    reached = [likelihood(of_truth, fit_mixture(of_truth, n)) for n in (1, 2, 4, 8, 2000)]
    assert reached == sorted(reached) or np.diff(reached).min() > -1e-9
    weights = fit_mixture(of_truth, num_steps=200_000, tolerance=1e-7)
    shares = of_truth * weights
    again = (shares / shares.sum(axis=1, keepdims=True)).mean(axis=0)
    np.testing.assert_allclose(again, weights, atol=2e-7)


@BOUNDED
@given(of_truth=probabilities_of_truth(), factor=st.floats(0.1, 1))
def test_making_all_members_less_likely_changes_no_weight(of_truth, factor):
    scaled = fit_mixture(of_truth * factor)
    np.testing.assert_allclose(scaled, fit_mixture(of_truth), atol=1e-4)


def test_a_known_maximum_between_two_members():
    # Likelihood (0.1 + 0.8 w)^3 (0.9 - 0.8 w): its derivative is zero at w = 0.8125.
    of_truth = np.array([[0.9, 0.1]] * 3 + [[0.1, 0.9]])
    np.testing.assert_allclose(fit_mixture(of_truth), [0.8125, 0.1875], atol=1e-6)


def test_a_member_that_is_always_better_gets_everything():
    weights = fit_mixture(np.array([[0.9, 0.3], [0.8, 0.2]]))
    np.testing.assert_allclose(weights, [1, 0], atol=1e-9)


def test_twins_share():
    of_truth = np.array([[0.9, 0.9], [0.2, 0.2]])
    assert fit_mixture(of_truth).tolist() == [0.5, 0.5]


def test_one_member_gets_everything():
    assert fit_mixture(np.array([[0.3], [0.0]])).tolist() == [1.0]


def test_an_image_that_nobody_knows_is_no_division_by_zero():
    weights = fit_mixture(np.array([[0.0, 0.0], [0.9, 0.1]]))
    assert np.isfinite(weights).all()
    assert weights[0] > weights[1]


def test_the_better_member_is_found_and_beats_the_plain_average():
    good, bad = [True] * 9 + [False], [True] * 4 + [False] * 5 + [True]
    found = judged(fit_of(good, bad, num_to_fit=10, times=6))
    assert list(found.weights) == ["a", "b"]
    assert found.weights["a"] > 0.9
    assert sum(found.weights.values()) == pytest.approx(1)
    assert (found.num_fitted, found.num_judged) == (10, 50)
    assert found.gain_nats > 0.1
    assert found.gain_interval[0] < found.gain_nats < found.gain_interval[1]
    assert (found.top1_plain, found.top1_fitted) == (0.5, 0.9)
    assert found.is_better


def test_the_figures_are_those_of_a_loop():
    rng = np.random.default_rng(3)
    rows = rng.dirichlet(np.ones(4), (2, 80)).astype(np.float32)
    truth = rng.integers(0, 4, 80)
    rows[0, np.arange(40), truth[:40]] += 1  # the first member is right on half of them
    rows /= rows.sum(-1, keepdims=True)
    fit, order = WeightFit("FP16", 40), rng.permutation(80)
    for some in np.array_split(order, 10):
        members = {"a": rows[0, some], "b": rows[1, some]}
        fit.add(PredictedBatch([], [], truth[some], {"FP16": members}, []))
    found = judged(fit)
    weights = fit_mixture(rows[:, order[:40], truth[order[:40]]].T.astype(np.float64))
    assert list(found.weights.values()) == pytest.approx(weights.tolist())
    mixed, plain = np.tensordot(weights, rows, 1), rows.mean(0)
    rest = order[40:]
    gains = np.log(mixed[rest, truth[rest]]) - np.log(plain[rest, truth[rest]])
    assert found.gain_nats == pytest.approx(gains.mean(), abs=1e-5)
    half = 1.96 * gains.std(ddof=1) / 40**0.5
    ends = gains.mean() - half, gains.mean() + half
    assert found.gain_interval == pytest.approx(ends, abs=1e-4)
    is_right = [(p[rest].argmax(1) == truth[rest]).mean() for p in (plain, mixed)]
    assert (found.top1_plain, found.top1_fitted) == tuple(is_right)
    assert found.top1_difference == pytest.approx(is_right[1] - is_right[0])
    assert found.top1_interval[0] <= found.top1_difference <= found.top1_interval[1]


def test_the_judged_images_have_no_say_in_the_weights():
    fit = fit_of([True, True], [False, False], num_to_fit=2)
    for _ in range(5):
        fit.add(batch({"a": told([False] * 2), "b": told([True] * 2)}, [0, 0]))
    found = judged(fit)
    assert found.weights["a"] > 0.99
    assert found.num_fitted == 2
    assert found.gain_nats < 0
    assert (found.top1_fitted, found.is_better) == (0, False)


def test_equal_members_do_not_beat_their_average():
    found = judged(fit_of([True, False], [True, False], num_to_fit=2, times=4, sure=0.9))
    assert found.gain_nats == pytest.approx(0, abs=1e-7)
    assert not found.is_better


def test_a_gain_in_likelihood_that_costs_top1_is_no_better():
    good, bad = [True] * 9 + [False], [True] * 4 + [False] * 5 + [True]
    found = judged(fit_of(good, bad, num_to_fit=10, times=6))
    assert found.is_better
    assert not replace(found, top1_difference=-0.01).is_better
    assert not replace(found, gain_interval=(-0.01, 0.5)).is_better


def test_the_ensembles_own_answer_is_no_member():
    fit = WeightFit("INT8", 1)
    for _ in range(3):
        rows = {"a": told([True] * 2), "b": told([False] * 2), ENSEMBLE: told([True] * 2, 1.0)}
        fit.add(batch(rows, [0, 0]))
    assert set(judged(fit).weights) == {"a", "b"}


def test_other_precisions_and_batches_without_readable_images_are_passed_over():
    fit = fit_of([True], [False], num_to_fit=1, times=3)
    fit.add(batch({"a": told([False]), "b": told([True])}, [0], "FP16"))
    fit.add(PredictedBatch([], [], np.empty(0, np.int64), {}, []))
    assert judged(fit).num_judged == 2


@pytest.mark.parametrize(("num_images", "times"), [(8, 1), (1, 1), (1, 2)])
def test_too_few_images_to_judge_are_no_result(num_images, times):
    """Of one judged image there is no interval; its ends would be infinite, which is no JSON."""
    fit = fit_of([True] * num_images, [False] * num_images, num_images * times // 2, times)
    assert fit.result() is None


def test_no_images_are_no_result():
    assert WeightFit("INT8", 0).result() is None


def test_the_outcome_is_plain_json():
    found = judged(fit_of([True, False], [False, False], num_to_fit=2, times=3))
    again = json.loads(json.dumps(asdict(found), allow_nan=False))
    assert again["weights"] == found.weights
    assert again["num_judged"] == 4
