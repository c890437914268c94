"""Answers to photographs held out: what they say of accuracy, temperatures and bounds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt
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
from calibration.learning.heads import Places
from models.ensemble import Flags, Probabilities, average, tempered
from models.manifest import ENSEMBLE, Manifest
from models.plan import AnswerSetRecord, AverageRecord, SubsetRecord, SureRecord
from models.record import Precision, wilson_interval

# Two photographs count as one, resized or cut, from this cosine of their features less the mean on;
# and only where it exceeds the likeness of a class's photographs by so much. Of 500 photographs of
# Imagenette 6 % have a neighbour that is as like; of copies cut to 90 % of their sides all have.
ALIKE_FROM, ALIKE_ABOVE, ALIKE_MOST = 0.75, 0.15, 0.98
NEIGHBOUR = 4  # its likeness is that of a class's photographs, even if each has some copies
LEAST_FEATURES = 64  # in fewer dimensions unlike photographs are alike by chance
SELDOM = 0.1  # the share of photographs that a bound of sure answers leaves out, at least
BLOCK = 1024  # rows compared at a time


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
