"""Fits linear heads on features in closed form, and answers each photograph by a head without it.

A head is ridge regression to the classes' indicators, with a bias, on photographs and their mirrors
(one-against-all least squares; Rifkin, Yeo and Poggio, 2003). Classes weigh the same, whatever
their numbers of photographs. A photograph that is held out is held out with its mirror and its
near-duplicates. Its head's strength of regularisation comes from cross-validation of the folds
that it is not in.

A leave-one-out answer needs no fit of its own: the residuals of a group G that is held out are
(I - H_GG)^-1 (y - yhat)_G, with the hat matrix H of the fit of all (Allen, 1974, for groups).
"""

from collections.abc import Collection
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt
from scipy.linalg import cho_factor, cho_solve

from calibration.learning.features import VIEWS, Features
from models.ensemble import Probabilities

Values = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]
# Strengths of regularisation, as shares of the features' mean square.
STRENGTHS = tuple(10.0**exponent for exponent in range(-4, 1))
SHARPNESS = 15.0  # of softmax on scores that are 0 or 1; temperatures are fitted afterwards
NUM_FOLDS = 5
LEAVE_ONE_OUT_BELOW = 10  # photographs in a class


@dataclass(frozen=True)
class Head:
    """The linear layer: logits are features (N, F) times ``weights``, (F, C), plus ``bias``."""

    weights: npt.NDArray[np.float32]
    bias: npt.NDArray[np.float32]
    strength: float

    def rows(self, features: npt.NDArray[np.float32]) -> Probabilities:
        """Return the probabilities (N, C) of features (N, F)."""
        return softmax(features.astype(np.float64) @ self.weights + self.bias)


def softmax(logits: Values) -> Probabilities:
    """Return float32 (N, C) that sum to one."""
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    rows: Probabilities = (powers / powers.sum(axis=1, keepdims=True)).astype(np.float32)
    return rows


@dataclass(frozen=True)
class Folds:
    """How photographs are held out: ``of`` (N,) is each one's fold, ``groups`` its group.

    A group is a photograph with its near-duplicates, and lies in one fold.
    """

    of: Places
    groups: Places
    leaves_one_out: bool

    @property
    def name(self) -> str:
        """The method, for readers of the figures."""
        return "leave-one-out" if self.leaves_one_out else f"{int(self.of.max()) + 1} folds"


def stratified_folds(truth: Places, groups: Places) -> Folds:
    """Deal the groups of each class to folds in turn, the same each time."""
    order = np.random.default_rng(0).permutation(len(truth))
    fold_of = dict[int, int]()
    counts = np.zeros((int(truth.max()) + 1, NUM_FOLDS), np.int64)
    for place in order:
        group = int(groups[place])
        if group not in fold_of:
            own = counts[truth[place]]
            least = np.flatnonzero(own == own.min())
            fold_of[group] = int(least[counts[:, least].sum(axis=0).argmin()])
        counts[truth[place], fold_of[group]] += 1
    of = np.array([fold_of[int(group)] for group in groups])
    fewest = np.bincount(truth).min()
    return Folds(np.unique(of, return_inverse=True)[1], groups, fewest < LEAVE_ONE_OUT_BELOW)


def fit(features: Features, truth: Places, folds: Folds) -> tuple[Head, Probabilities]:
    """Return the head of all photographs, and each one's row by a head without it.

    ``features`` are (N, 2, F), ``truth`` (N,). The rows are (N, C), of photographs, not mirrors.
    """
    problem = _Problem(features, truth, folds)
    of_folds, of_pairs = problem.losses()
    held = np.empty((len(truth), problem.num_classes))
    for fold, losses in enumerate(of_pairs):
        strength, own = STRENGTHS[int(losses.argmin())], folds.of == fold
        if folds.leaves_one_out:
            held[own] = problem.left_out(strength, fold)
        else:
            held[own] = problem.scores(fold, problem.solution(strength, {fold}))[::VIEWS]
    return problem.head(STRENGTHS[int(of_folds.argmin())]), softmax(SHARPNESS * held)


class _Problem:
    """The weighted least squares of one network's features, in at most 2 N dimensions."""

    def __init__(self, features: Features, truth: Places, folds: Folds) -> None:
        self.num_classes = int(truth.max()) + 1
        rows = features.reshape(-1, features.shape[-1]).astype(np.float64)  # (2 N, F)
        self._mean = rows.mean(axis=0)
        rows -= self._mean
        self._scale = max(float(np.sqrt((rows**2).sum(axis=1).mean())), 1e-12)
        rows /= self._scale
        # Ridge regression only sees inner products: 2 N dimensions hold those of 2 N rows.
        self._basis = np.linalg.qr(rows.T)[0] if len(rows) < rows.shape[1] else None
        if self._basis is not None:
            rows = rows @ self._basis
        rows = np.concatenate([rows, np.ones((len(rows), 1))], axis=1)  # with the bias
        classes = np.repeat(truth, VIEWS)
        share = np.bincount(classes, minlength=self.num_classes) / len(classes)
        weights = 1 / (self.num_classes * share[classes])[:, None]
        targets = np.eye(self.num_classes)[classes] - 1 / self.num_classes
        of = np.repeat(folds.of, VIEWS)
        places = [np.flatnonzero(of == fold) for fold in range(int(of.max()) + 1)]
        self._groups = np.repeat(folds.groups, VIEWS)
        self._places, self._rows, self._weights, self._targets = places, rows, weights, targets
        scaled = rows * weights / len(rows)
        self._squares = [rows[own].T @ scaled[own] for own in places]
        self._products = [scaled[own].T @ targets[own] for own in places]
        losses = (targets**2).sum(axis=1) * weights[:, 0]  # of the solution 0
        self._constants = [float(losses[own].sum()) for own in places]
        self._all = np.sum(self._squares, axis=0), np.sum(self._products, axis=0)

    def solution(self, strength: float, without: Collection[int] = ()) -> Values:
        """Return the weights (D, C) fitted on all folds but some."""
        products = self._all[1].copy()
        for fold in without:
            products -= self._products[fold]
        solved: Values = cho_solve(self._factor(strength, without), products)
        return solved

    def scores(self, fold: int, solution: Values) -> Values:
        """Return the scores of a fold's photographs and mirrors."""
        scores: Values = self._rows[self._places[fold]] @ solution
        return scores

    def losses(self) -> tuple[Values, Values]:
        """Return the loss of each strength, and that of each fold (row) and strength.

        The first is that of every fold by a fit without it. The second leaves the fold out of
        everything: it is that of every other fold, by a fit without both.
        """
        number = len(self._places)
        alone, pairs = np.zeros(len(STRENGTHS)), np.zeros((number, len(STRENGTHS)))
        for column, strength in enumerate(STRENGTHS):
            for fold in range(number):
                alone[column] += self._loss(fold, self.solution(strength, {fold}))
            for first, second in combinations(range(number), 2):
                solution = self.solution(strength, {first, second})
                pairs[first, column] += self._loss(second, solution)
                pairs[second, column] += self._loss(first, solution)
        return alone, pairs

    def left_out(self, strength: float, fold: int) -> Values:
        """Return the scores of a fold's photographs, each by a fit without its group alone."""
        factor, own = self._factor(strength), self._places[fold]
        all_rows, groups = self._rows[own], self._groups[own]
        scores = self._targets[own]
        residuals = scores - all_rows @ self.solution(strength)
        for places in _by_value(groups):
            rows, weights = all_rows[places], self._weights[own[places]] / len(self._rows)
            hat = rows @ cho_solve(factor, (rows * weights).T)
            scores[places] -= np.linalg.solve(np.eye(len(places)) - hat, residuals[places])
        return scores[::VIEWS]

    def head(self, strength: float) -> Head:
        """Return the head of all photographs, for features as they are."""
        *weights, bias = self.solution(strength)
        own = np.array(weights) * SHARPNESS
        of_features = (own if self._basis is None else self._basis @ own) / self._scale
        shift = SHARPNESS * bias - self._mean @ of_features
        return Head(of_features.astype(np.float32), shift.astype(np.float32), strength)

    def _factor(self, strength: float, without: Collection[int] = ()) -> tuple[Values, bool]:
        squares = self._all[0].copy()
        for fold in without:
            squares -= self._squares[fold]
        np.fill_diagonal(squares, squares.diagonal() + strength)
        factor: tuple[Values, bool] = cho_factor(squares, overwrite_a=True, check_finite=False)
        return factor

    def _loss(self, fold: int, solution: Values) -> float:
        own = self._places[fold]
        if len(own) > len(solution):  # of many photographs by their products, which are there
            errors = (solution * (self._squares[fold] @ solution - 2 * self._products[fold])).sum()
            return float(errors * len(self._rows) + self._constants[fold])
        of_each = (self.scores(fold, solution) - self._targets[own]) ** 2
        return float((of_each.sum(axis=1) * self._weights[own, 0]).sum())


def _by_value(groups: Places) -> list[Places]:
    """Return the places of each value."""
    order = np.argsort(groups, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(groups[order])) + 1)
