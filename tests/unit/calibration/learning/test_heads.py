"""Heads in closed form against fits made the long way, and against scikit-learn's."""

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from calibration.learning.heads import (
    SHARPNESS,
    Folds,
    _Problem,
    alike_groups,
    fit,
    stratified_folds,
)


def drawn(num_classes=4, each=15, width=20, noise=1.0, seed=0):
    """Features of photographs and mirrors (N, 2, F) around a centre for each class."""
    rng = np.random.default_rng(seed)
    truth = np.repeat(np.arange(num_classes), each)
    centres = np.random.default_rng(99).normal(0, 1, (num_classes, 1, width))
    own = centres[truth] + rng.normal(0, noise, (len(truth), 1, width))
    return (own + rng.normal(0, 0.1, (len(truth), 2, width))).astype(np.float32), truth


def alone(number):
    return np.arange(number)


@pytest.mark.parametrize("width", [10, 400])  # more and fewer photographs than features
def test_leaving_out_in_closed_form_is_a_fit_without_them(width):
    features, truth = drawn(width=width, each=6)
    groups = alone(len(truth))
    groups[1] = groups[0]  # near-duplicates
    folds = Folds(np.arange(len(truth)) % 5, groups, leaves_one_out=True)
    folds.of[1] = folds.of[0]
    problem = _Problem(features, truth, folds)
    fold = int(folds.of[0])
    scores = problem.left_out(0.1, fold)
    own = np.flatnonzero(folds.of == fold)
    for row, place in zip(scores, own, strict=True):
        group = np.flatnonzero(groups == groups[place])
        apart = Folds((groups == groups[place]).astype(int), groups, leaves_one_out=False)
        slowly = _Problem(features, truth, apart)
        expected = slowly.scores(1, slowly.solution(0.1, {1}))[::2]
        assert np.allclose(row, expected[int(np.flatnonzero(group == place)[0])], atol=1e-6)


def test_losses_by_products_are_those_by_scores(monkeypatch):
    features, truth = drawn(num_classes=3, each=40, width=10)  # a fold has more rows than features
    problem = _Problem(features, truth, stratified_folds(truth, alone(len(truth))))
    alone_by_products, pairs_by_products = problem.losses()
    monkeypatch.setattr(
        _Problem,
        "_loss",
        lambda self, fold, solution: (
            ((self.scores(fold, solution) - self._targets[own := self._places[fold]]) ** 2).sum(1)
            * self._weights[own, 0]
        ).sum(),
    )
    for fast, slow in zip((alone_by_products, pairs_by_products), problem.losses(), strict=True):
        assert np.allclose(fast, slow, rtol=1e-9)


def test_the_head_gives_the_scores_of_its_problem():
    features, truth = drawn()
    folds = stratified_folds(truth, alone(len(truth)))
    head, _ = fit(features, truth, folds)
    problem = _Problem(features, truth, folds)
    scores = problem.scores(0, problem.solution(head.strength))[::2]
    logits = features[folds.of == 0, 0] @ head.weights + head.bias
    assert np.allclose(logits - logits[:, :1], SHARPNESS * (scores - scores[:, :1]), atol=1e-3)


def test_a_head_is_as_good_as_logistic_regression():
    features, truth = drawn(6, 20, 60, noise=2.2)
    head, _ = fit(features, truth, stratified_folds(truth, alone(len(truth))))
    new, new_truth = drawn(6, 300, 60, noise=2.2, seed=1)
    other = LogisticRegression(max_iter=500)
    other.fit(features.reshape(-1, 60), np.repeat(truth, 2))
    own = (head.rows(new[:, 0]).argmax(axis=1) == new_truth).mean()
    assert 0.5 < own < 0.99
    assert own > other.score(new[:, 0], new_truth) - 0.01


def test_held_out_rows_tell_the_accuracy_on_new_photographs():
    features, truth = drawn(5, 40, 40, noise=2.0)
    head, held = fit(features, truth, stratified_folds(truth, alone(len(truth))))
    new, new_truth = drawn(5, 400, 40, noise=2.0, seed=2)
    expected = (head.rows(new[:, 0]).argmax(axis=1) == new_truth).mean()
    assert abs((held.argmax(axis=1) == truth).mean() - expected) < 0.06


@pytest.mark.parametrize("each", [4, 12])
def test_labels_by_chance_are_not_learned(each):
    """Nothing of a photograph that is held out leaks, nor of its mirror."""
    rng = np.random.default_rng(3)
    truth = np.repeat(np.arange(5), each * 5)
    features = np.repeat(rng.normal(0, 1, (len(truth), 1, 300)), 2, axis=1).astype(np.float32)
    folds = stratified_folds(truth, alone(len(truth)))
    folds = Folds(folds.of, folds.groups, leaves_one_out=each == 4)
    _, held = fit(features, truth, folds)
    assert (held.argmax(axis=1) == truth).mean() < 0.35


def test_classes_of_unequal_size_weigh_the_same():
    features, truth = drawn(2, 100, 5, noise=1.5)
    few = np.concatenate([np.flatnonzero(truth == 0), np.flatnonzero(truth == 1)[:10]])
    head, _ = fit(features[few], truth[few], stratified_folds(truth[few], alone(len(few))))
    new, new_truth = drawn(2, 500, 5, noise=1.5, seed=4)
    right = head.rows(new[:, 0]).argmax(axis=1) == new_truth
    assert right[new_truth == 1].mean() > right[new_truth == 0].mean() - 0.15


def test_folds_have_each_class_alike_and_keep_groups_whole():
    truth = np.repeat(np.arange(3), 20)
    groups = alone(60)
    groups[[1, 2]] = groups[0]
    folds = stratified_folds(truth, groups)
    assert len({int(folds.of[place]) for place in (0, 1, 2)}) == 1
    for of in range(3):
        counts = np.bincount(folds.of[truth == of], minlength=5)
        assert counts.max() - counts.min() <= 3
    assert not folds.leaves_one_out
    assert folds.name == "5 folds"


def test_few_photographs_are_left_out_one_by_one():
    truth = np.repeat(np.arange(2), [9, 30])
    assert stratified_folds(truth, alone(39)).leaves_one_out


def test_near_duplicates_are_grouped_and_others_are_not():
    rng = np.random.default_rng(5)
    truth = np.repeat(np.arange(3), 20)
    features = rng.normal(0, 1, (60, 256)) + rng.normal(0, 1, (3, 256))[truth]
    features[41] = features[40] + rng.normal(0, 0.2, 256)
    groups = alike_groups([features.astype(np.float32)], truth, [str(n) for n in range(60)])
    assert groups[40] == groups[41]
    assert len(np.unique(groups)) == 59


def test_copies_of_all_photographs_are_grouped():
    rng = np.random.default_rng(6)
    truth = np.repeat(np.arange(3), 20)
    own = rng.normal(0, 1, (60, 256)) + rng.normal(0, 1, (3, 256))[truth]
    both = np.concatenate([own, own + rng.normal(0, 0.2, own.shape)]).astype(np.float32)
    groups = alike_groups(
        [both.astype(np.float32)], np.tile(truth, 2), [str(n) for n in range(120)]
    )
    assert (groups[:60] == groups[60:]).all()
    assert len(np.unique(groups)) == 60


def test_a_class_whose_photographs_are_all_alike_is_no_group():
    rng = np.random.default_rng(7)
    truth = np.repeat(np.arange(2), 30)
    features = rng.normal(0, 3, (2, 256))[truth] + rng.normal(0, 0.5, (60, 256))
    groups = alike_groups([features.astype(np.float32)], truth, [str(n) for n in range(60)])
    assert len(np.unique(groups)) == 60


def test_crops_of_one_photograph_belong_together():
    features, truth = drawn(2, 4)
    groups = alike_groups([features[:, 0]], truth, ["a", "b", "c", "d", "x", "x", "y", "y"])
    assert groups[4] == groups[5] != groups[6] == groups[7]
