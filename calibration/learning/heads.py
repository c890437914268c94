"""Fits linear heads on features in closed form, and answers each photograph by a head without it.

A head is ridge regression to the classes' indicators, with a bias, on photographs and their mirrors
(one-against-all least squares; Rifkin, Yeo and Poggio, 2003). Classes weigh the same, whatever
their numbers of photographs. A photograph that is held out is held out with its mirror and its
near-duplicates. Its head's strength of regularisation comes from cross-validation of the folds
that it is not in.

A leave-one-out answer needs no fit of its own: the residuals of a group G that is held out are
(I - H_GG)^-1 (y - yhat)_G, with the hat matrix H of the fit of all (Allen, 1974, for groups).
:class:`HeldOut` has these answers, and what they say of accuracy, temperatures and bounds.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt
from scipy.linalg import cho_factor, cho_solve
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from calibration.evaluation.fitting import (
    COVERAGE,
    Answers,
    answer_set_bound,
    choose_bound,
    fit_temperature,
    in_answer_set,
)
from calibration.learning.features import VIEWS, Features
from models.ensemble import (
    AnswerSetRecord,
    AverageRecord,
    Flags,
    Probabilities,
    SubsetRecord,
    SureRecord,
    average,
    tempered,
)
from models.manifest import ENSEMBLE, Manifest
from models.record import Precision, wilson_interval

Values = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]
# Strengths of regularisation, as shares of the features' mean square.
STRENGTHS = tuple(10.0**exponent for exponent in range(-4, 1))
SHARPNESS = 15.0  # of softmax on scores that are 0 or 1; temperatures are fitted afterwards
NUM_FOLDS = 5
LEAVE_ONE_OUT_BELOW = 10  # photographs in a class
# Two photographs count as one, resized or cut, from this cosine of their features less the mean on;
# and only where it exceeds the likeness of a class's photographs by so much. Of 500 photographs of
# Imagenette 6 % have a neighbour that is as like; of copies cut to 90 % of their sides all have.
ALIKE_FROM, ALIKE_ABOVE, ALIKE_MOST = 0.75, 0.15, 0.98
NEIGHBOUR = 4  # its likeness is that of a class's photographs, even if each has some copies
LEAST_FEATURES = 64  # in fewer dimensions unlike photographs are alike by chance
SELDOM = 0.1  # the share of photographs that a bound of sure answers leaves out, at least
BLOCK = 1024  # rows compared at a time


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


def alike_groups(
    features: Sequence[npt.NDArray[np.float32]], truth: Places, origins: Sequence[str]
) -> Places:
    """Return a group (N,) for each photograph; near-duplicates have the same.

    ``features`` are (N, F) of each network, ``truth`` (N,) the classes; ``origins`` (N,) joins what
    is known to belong together. The likeness is the mean over the networks.
    """
    number = len(truth)
    units = [_unit(of) for of in features if of.shape[1] >= LEAST_FEATURES]
    first = dict[str, int]()
    pairs = [np.array([(first.setdefault(of, n), n) for n, of in enumerate(origins)])]
    values, usual = [np.full(number, np.inf)], np.full(number, -1.0)
    for start in range(0, number if units else 0, BLOCK):
        rows = slice(start, start + BLOCK)
        likeness = np.mean([unit[rows] @ unit.T for unit in units], axis=0)
        alike = np.argwhere(likeness >= ALIKE_FROM)
        values.append(likeness[tuple(alike.T)])
        pairs.append(np.add(alike, (start, 0)))
        likeness[truth[rows, None] != truth] = -1
        place = max(0, number - 1 - NEIGHBOUR)  # the photograph itself is the likest
        usual[rows] = np.partition(likeness, place, axis=1)[:, place]
    of_class = np.array([np.median(usual[truth == of]) for of in range(int(truth.max()) + 1)])
    least = np.minimum(ALIKE_MOST, of_class + ALIKE_ABOVE)[truth]
    ends, like = np.concatenate(pairs), np.concatenate(values)
    ends = ends[like >= np.maximum(least[ends[:, 0]], least[ends[:, 1]])]
    links = coo_array((np.ones(len(ends)), (ends[:, 0], ends[:, 1])), shape=(number, number))
    groups: Places = connected_components(links, directed=False)[1].astype(np.int64)
    return groups


def _unit(features: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    own = features - features.mean(axis=0)
    unit: npt.NDArray[np.float32] = own / np.maximum(np.linalg.norm(own, axis=1), 1e-9)[:, None]
    return unit


@dataclass(frozen=True)
class HeldOut:
    """Rows of photographs by heads that have not seen them."""

    truth: Places  # (N,)
    folds: Places  # (N,), of which each is judged by what the others chose
    rows: Mapping[Precision, Mapping[str, Probabilities]]  # (N, C), of members, without temperature

    def temperatures(self, manifest: Manifest, precision: Precision) -> dict[str, float]:
        """Return the members' temperatures and that of their average."""
        rows = self.rows[precision]
        fitted = {name: fit_temperature(rows[name], self.truth) for name in manifest.weights}
        own = {name: tempered(rows[name], fitted[name]) for name in fitted}
        fitted[ENSEMBLE] = fit_temperature(average(own, manifest.weights), self.truth)
        return fitted

    def tempered(self, manifest: Manifest) -> dict[Precision, dict[str, Probabilities]]:
        """Return the rows of members and ensemble with the manifest's temperatures."""
        known, whole = manifest.temperatures, dict[Precision, dict[str, Probabilities]]()
        for precision, rows in self.rows.items():
            whole[precision] = {name: tempered(of, known[name]) for name, of in rows.items()}
            if rows.keys() == manifest.weights.keys():
                mean = average(whole[precision], manifest.weights, known[ENSEMBLE])
                whole[precision][ENSEMBLE] = mean
        return whole

    def trusted(self, manifest: Manifest, precision: Precision, target: float) -> Manifest:
        """Return the manifest with the bounds of all members, and of each subset of them."""
        members = self.tempered(manifest)[precision]
        names = tuple(manifest.weights)
        whole = self._average(members, names, manifest, target)
        sizes = range(1, len(names)) if len(names) <= 4 else sorted({1, len(names) - 1})
        trust = tuple(
            SubsetRecord(members=subset, **dict(self._average(members, subset, manifest, target)))
            for size in sizes
            for subset in combinations(names, size)
        )
        update = {"sure": whole.sure, "answer_set": whole.answer_set, "trust": trust}
        return manifest.model_copy(update=update)

    def _average(
        self,
        members: Mapping[str, Probabilities],
        names: Sequence[str],
        manifest: Manifest,
        target: float,
    ) -> AverageRecord:
        """Return what an average is worth; each fold is judged by the bounds that others chose."""
        rows, truth = average({n: members[n] for n in names}, manifest.weights), self.truth
        temperature = 1.0 if len(names) == 1 else fit_temperature(rows, truth)
        if len(names) == len(manifest.weights):
            temperature = manifest.temperature
        rows = tempered(rows, temperature)
        is_sure, is_in = np.zeros(len(truth), np.bool_), np.zeros(rows.shape, np.bool_)
        for fold in np.unique(self.folds):
            own, others = self.folds == fold, self.folds != fold
            bound = _bound(rows[others], truth[others], target)
            is_sure[own] = False if bound is None else rows[own].max(axis=1) >= np.float32(bound)
            is_in[own] = in_answer_set(rows[own], answer_set_bound(rows[others], truth[others]))
        bound = _bound(rows, truth, target)
        right = rows.argmax(axis=1) == truth
        return AverageRecord(
            temperature=temperature,
            sure=None if bound is None else _sure_record(bound, target, is_sure, right),
            answer_set=AnswerSetRecord(
                probability=answer_set_bound(rows, truth),
                target=COVERAGE,
                num_images=len(truth),
                coverage=round(float(is_in[np.arange(len(truth)), truth].mean()), 4),
                mean_size=round(float(is_in.sum(axis=1).mean()), 3),
            ),
        )


def _bound(rows: Probabilities, truth: Places, target: float) -> float | None:
    """Return the bound of sure answers, below which few of the photographs (N, C) lie.

    Where none is wrong every bound shows ``target``. But nothing is known of less likely answers,
    as foreign photographs get.
    """
    bound = choose_bound(Answers(rows, truth, None), target)
    usual = float(np.quantile(rows.max(axis=1), SELDOM))
    return None if bound is None else max(bound, np.floor(usual * 1000) / 1000)


def _sure_record(bound: float, target: float, is_sure: Flags, right: Flags) -> SureRecord:
    """Return the record of a bound by which photographs (N,) are sure, and which are right."""
    num_right, num_sure = int(right[is_sure].sum()), int(is_sure.sum())
    low, high = wilson_interval(num_right, num_sure) if num_sure else (0.0, 1.0)
    return SureRecord(
        probability=bound,
        target=target,
        num_images=len(right),
        share=round(num_sure / len(right), 4),
        right=round(num_right / num_sure, 4) if num_sure else None,
        right_interval=(round(low, 4), round(high, 4)),
        measured_on="photographs held out",
    )
