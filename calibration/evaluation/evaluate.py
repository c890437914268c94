"""Evaluates a set on a labelled dataset: each member and the ensemble, float and INT8.

Of foreign images, which show none of its classes, it counts the answers that are sure.

Of a multi-label set it measures mean average precision, micro and macro F1. Average precision of a
class is the mean of the precision at each of its images, with images sorted by the class's score
(ties are a single step). mAP is its mean over the classes that have an image. Micro F1 counts all
labels of all images together; macro F1 is the mean over those classes. Intervals are the estimate
and 1.96 standard errors, from 200 resamples of the images (bootstrap; Efron and Tibshirani 1993: 50
to 200 are enough for a standard error). Scores are kept until the end, 4 bytes per image, class and
network, since average precision needs their order over all images.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from calibration.datasets import (
    Dataset,
    ImageFile,
    LabelledImage,
    LabelSets,
    MultiLabelledImage,
    file_hashes,
    find_images,
    images_digest,
    label_truth_of,
    short_name,
    truth_of,
)
from calibration.evaluation.fitting import Rows, foreign_record, part_of
from calibration.evaluation.inference import AnsweredBatch, Networks, Observer, Track
from calibration.statistics import Indices, ModeTally, Paired, Rightness, Tally
from models.ensemble import Flags, ForeignRecord, Probabilities, Trust, above, average, by_plan
from models.errors import ModelSetError
from models.manifest import ENSEMBLE, Manifest
from models.model_set import ModelSet, read_lines
from models.record import Z95, Drop, MultiLabelDrop, MultiLabelScore, Precision, Score

NO_CLASS = -1  # of a foreign image
FAST = "fast, answered by "  # a step of the plan, by the members that it has asked


class Modes:
    """Counts the answers of each mode in which a set may answer, on the images for judging.

    They are all members, the fast plan and each of its steps, and some members alone, where the
    others are missing or left out.
    """

    def __init__(self, manifest: Manifest, precision: Precision) -> None:
        self._weights, self._trust = manifest.weights, manifest.trust_table
        self._plan = manifest.usable_plan(precision)
        self._subsets = [subset.members for subset in manifest.trust]
        self.tallies: dict[str, ModeTally] = {}

    def add(
        self, images: Sequence[LabelledImage], rows: Mapping[str, Probabilities], truth: Indices
    ) -> None:
        """Add a batch; ``rows`` are (N, C) of each member."""
        judges = np.array([part_of(image.path) == "judge" for image in images], np.bool_)
        truth = truth[judges]
        members = {name: rows[name][judges] for name in self._weights}
        for mode, trust, answers, own in self.answers(members):
            tally = self.tallies.setdefault(mode, ModeTally(trust.sure_from, trust.set_from))
            tally.add(answers, truth[own])

    def answers(
        self, members: Mapping[str, Probabilities]
    ) -> Iterator[tuple[str, Trust, Probabilities, Flags]]:
        """Yield each mode, its trust, its rows (K, C), and which of N images it answers.

        ``members`` has rows (N, C) of each member.
        """
        every = np.ones(len(next(iter(members.values()))), np.bool_)

        def averaged(names: Sequence[str]) -> tuple[Trust, Probabilities, Flags]:
            trust = self._trust.of(dict.fromkeys(names))
            some = {name: members[name] for name in names}
            return trust, average(some, self._weights, trust.temperature), every

        yield "full", *averaged(list(self._weights))
        if self._plan is not None and every.any():
            answers, at = by_plan(self._plan, members, self._weights)
            asked: tuple[str, ...] = ()
            for number, step in enumerate(self._plan.steps):
                asked += step.ask
                own, trust = at == number, self._trust.of(dict.fromkeys(asked), number)
                yield f"{FAST}{' + '.join(asked)}", trust, answers[own], own
        for names in self._subsets:
            yield f"{' + '.join(names)} alone", *averaged(names)


@dataclass
class Evaluation:
    """The counts of an evaluation, by precision, then by member name or ``ensemble``."""

    dataset: Dataset
    images_sha256: str
    tallies: dict[Precision, dict[str, Tally]] = field(default_factory=dict)
    drops: dict[str, Paired] = field(default_factory=dict)  # float against INT8
    over_members: dict[Precision, dict[str, Paired]] = field(default_factory=dict)
    num_agreed: dict[Precision, int] = field(default_factory=dict)  # images with equal top-1 of all
    # How far answers can be relied on, by the set's bounds, on images that chose none of them.
    modes: "dict[Precision, Modes]" = field(default_factory=dict)
    unreadable: list[str] = field(default_factory=list)
    float_type: dict[Precision, str] = field(default_factory=dict)
    int8_kernels: str = ""
    cpu_ms_per_image: dict[str, dict[Precision, float]] = field(default_factory=dict)

    @property
    def scores(self) -> dict[Precision, dict[str, Score | MultiLabelScore]]:
        """Return the figures for the record."""
        return {
            precision: {name: tally.score for name, tally in tallies.items()}
            for precision, tallies in self.tallies.items()
        }

    @property
    def lost(self) -> dict[str, Drop | MultiLabelDrop]:
        """Return the losses for the record."""
        return {name: pair.drop for name, pair in sorted(self.drops.items())}

    @property
    def num_images(self) -> int:
        """The number of images that were read and answered."""
        return next((t.num_images for by in self.tallies.values() for t in by.values()), 0)

    def add(self, batch: AnsweredBatch[LabelledImage]) -> None:
        """Add a batch."""
        truth = truth_of(batch.images)
        self.unreadable += [f"{image.path}: {why}" for image, why in batch.unreadable]
        right: dict[Precision, dict[str, Rightness]] = {}
        for precision, rows in batch.probabilities.items():
            tallies = self.tallies.setdefault(precision, {})
            for name, probabilities in rows.items():
                tally = tallies.setdefault(name, Tally(probabilities.shape[1]))
                right.setdefault(precision, {})[name] = tally.add(probabilities, truth)
            members = [name for name in rows if name != ENSEMBLE]
            if ENSEMBLE in rows:
                pairs, of_all = self.over_members.setdefault(precision, {}), right[precision]
                for name in members:
                    pairs.setdefault(name, Paired()).add(of_all[ENSEMBLE], of_all[name])
                if (modes := self.modes.get(precision)) is not None:
                    modes.add(batch.images, rows, truth)
            firsts = np.stack([rows[name].argmax(1) for name in members])
            agreed = int((firsts == firsts[0]).all(axis=0).sum())
            self.num_agreed[precision] = self.num_agreed.get(precision, 0) + agreed
        for name in right.get("FP16", {}).keys() & right.get("INT8", {}).keys():
            drop = self.drops.setdefault(name, Paired())
            drop.add(right["FP16"][name], right["INT8"][name])


def evaluate_set(
    model_set: ModelSet,
    dataset: Dataset,
    precisions: Sequence[Precision],
    *,
    track: Track[LabelledImage] = lambda batches, _: batches,
    observe: Observer[LabelledImage] | None = None,
) -> Evaluation:
    """Run every image through every network; unreadable images are listed, without an error.

    ``track`` wraps the batches, for a progress bar. ``observe`` is called with each batch, in the
    thread that ran it. Raises :class:`ModelSetError` if an image was used for calibration, or none
    can be read.
    """
    result = Evaluation(dataset, check_not_calibrated(model_set, dataset.images))
    if model_set.manifest.sure is not None:
        result.modes = {p: Modes(model_set.manifest, p) for p in precisions}
    networks = Networks(model_set, precisions)
    result.float_type = networks.float_types()
    result.int8_kernels = networks.int8_kernels()
    result.cpu_ms_per_image = networks.cpu_ms_per_image()
    for answered in networks.answers(dataset.images, track, observe):
        result.add(answered)
    if not result.num_images:
        raise ModelSetError(
            f"none of the {len(dataset.images)} images of {dataset.name} can be read: "
            f"{result.unreadable[0]}"
        )
    return result


def check_not_calibrated(model_set: ModelSet, images: Sequence[ImageFile]) -> str:
    """Raise if an image was used for calibration; return a hash over all images' hashes."""
    record = model_set.manifest.calibration
    used = set(read_lines(model_set.verified(record))) if record else set()
    hashes = file_hashes(images)  # what is unreadable is listed later
    if seen := [path for path, value in hashes.items() if value in used]:
        raise ModelSetError(
            f"{len(seen)} of {len(images)} images were used to make {model_set.name} (INT8 or a "
            f"head was fitted to them, or chose its float layers by them), as {seen[0]}: accuracy "
            "on them proves nothing. Give other images, or make it again without these"
        )
    return images_digest(hashes.values())


def read_foreign(folder: Path, model_set: ModelSet) -> tuple[list[LabelledImage], str]:
    """Return the images below a folder, without those in folders named as the set's classes.

    The text says what was left out. Raises :class:`ModelSetError` if nothing is left.
    """
    own = {*model_set.labels, *(model_set.class_ids or ())}
    paths = find_images(folder)
    kept = [path for path in paths if not own & {*path.relative_to(folder).parts[:-1]}]
    if not kept:
        raise ModelSetError(
            f"--foreign {folder}: all {len(paths)} images are in folders named as classes of "
            f"{model_set.name}; give images of other classes"
        )
    num_own = len(paths) - len(kept)
    note = f"{num_own} images left out: their folders are named as the set's classes"
    return [LabelledImage(path, NO_CLASS) for path in kept], note if num_own else ""


def foreign_rows(
    model_set: ModelSet,
    precision: Precision,
    images: Sequence[LabelledImage],
    folder: Path,
    track: Track[LabelledImage] = lambda batches, _: batches,
) -> Rows:
    """Return the members' answers to images of other classes; unreadable ones are left out."""
    rows = Rows(model_set.manifest, precision, short_name(folder))
    unreadable = []
    for answered in Networks(model_set, (precision,)).answers(images, track, rows.add):
        unreadable += answered.unreadable
    if len(unreadable) == len(images):
        path, why = unreadable[0][0].path, unreadable[0][1]
        raise ModelSetError(f"--foreign: none of {len(images)} images can be read: {path}: {why}")
    return rows


def sure_of_foreign(model_set: ModelSet, rows: Rows) -> dict[str, ForeignRecord]:
    """Return how many answers are sure in each mode of a set, of the images that judge.

    The mode ``fast`` is the whole plan. Raises :class:`ModelSetError` if no mode has a bound, or
    no image judges.
    """
    judge, modes = rows.mask("judge"), Modes(model_set.manifest, rows.precision)
    if not judge.any():
        raise ModelSetError(
            f"--foreign: none of {len(judge)} images is in the half that judges; give more"
        )
    members = {name: of[judge] for name, of in rows.members.items()}
    reached: dict[str, list[bool]] = {}
    for name, trust, answers, _ in modes.answers(members):
        if trust.sure_from is None:
            continue
        own = (answers.max(axis=1) >= np.float32(trust.sure_from)).tolist()
        reached[name] = own
        if name.startswith(FAST):
            reached.setdefault("fast", []).extend(own)
    if not reached:
        raise ModelSetError(
            f"--foreign: {model_set.name} has no bound of sure answers; tandem evaluate "
            f"{model_set.argument} --images DIR --sure-at 0.95 --foreign DIR chooses one"
        )
    return {name: foreign_record(own, rows.dataset) for name, own in reached.items() if own}


Values = npt.NDArray[np.float64]  # (R, 3): mAP, micro F1, macro F1
Labels = npt.NDArray[np.bool_]  # (N, C), which labels each image has
Counts = npt.NDArray[np.float32]  # (R, N), how often each image is in a resample
NUM_RESAMPLES = 200
SEED = 20
MAX_CELLS = 2_000_000  # of an array at a time


@dataclass(frozen=True)
class Resampled:
    """A classifier's figures on the images, and on resampled images."""

    values: Values  # (1, 3)
    resamples: Values  # (NUM_RESAMPLES, 3)

    @property
    def score(self) -> MultiLabelScore:
        """Return the figures for the record, each with its 95 % interval."""
        errors = _standard_errors(self.resamples)
        (mean, micro, macro), (of_mean, of_micro, of_macro) = self.values[0], errors
        return MultiLabelScore(
            mean_average_precision=round(float(mean), 4),
            mean_average_precision_interval=_interval(mean, of_mean, 0.0),
            micro_f1=round(float(micro), 4),
            micro_f1_interval=_interval(micro, of_micro, 0.0),
            macro_f1=round(float(macro), 4),
            macro_f1_interval=_interval(macro, of_macro, 0.0),
        )


@dataclass
class MultiLabelEvaluation:
    """The measurements, by precision, then by member name or ``ensemble``."""

    dataset: LabelSets
    images_sha256: str
    threshold: float
    float_type: dict[Precision, str]
    int8_kernels: str
    cpu_ms_per_image: dict[str, dict[Precision, float]]
    num_images: int = 0
    num_labels: int = 0  # over all images
    num_exact: dict[Precision, dict[str, int]] = field(default_factory=dict)  # all labels right
    figures: dict[Precision, dict[str, Resampled]] = field(default_factory=dict)
    unreadable: list[str] = field(default_factory=list)

    @property
    def scores(self) -> dict[Precision, dict[str, Score | MultiLabelScore]]:
        """Return the figures for the record."""
        return {
            precision: {name: resampled.score for name, resampled in by_name.items()}
            for precision, by_name in self.figures.items()
        }

    @property
    def lost(self) -> dict[str, Drop | MultiLabelDrop]:
        """Return the losses of INT8; empty unless float and INT8 were both measured."""
        before, after = self.figures.get("FP16", {}), self.figures.get("INT8", {})
        return {name: drop_of(before[name], after[name]) for name in sorted(before.keys() & after)}


def evaluate_label_sets(
    model_set: ModelSet,
    dataset: LabelSets,
    precisions: Sequence[Precision],
    *,
    track: Track[MultiLabelledImage] = lambda batches, _: batches,
    observe: Observer[MultiLabelledImage] | None = None,
) -> MultiLabelEvaluation:
    """Run every image through every network; unreadable images are listed, without an error.

    ``observe`` is called with each batch, in the thread that ran it. Raises :class:`ModelSetError`
    if an image was used for calibration, or none with a label can be read.
    """
    threshold = model_set.manifest.threshold
    assert threshold is not None  # the set is multi-label
    digest = check_not_calibrated(model_set, dataset.images)
    networks = Networks(model_set, precisions)
    result = MultiLabelEvaluation(
        dataset,
        digest,
        threshold,
        networks.float_types(),
        networks.int8_kernels(),
        networks.cpu_ms_per_image(),
    )

    images = list[MultiLabelledImage]()
    rows: dict[Precision, dict[str, list[Probabilities]]] = {}
    for answered in networks.answers(dataset.images, track, observe):
        images += answered.images
        result.unreadable += [f"{image.path}: {why}" for image, why in answered.unreadable]
        for precision, by_name in answered.probabilities.items():
            for name, scores in by_name.items():
                rows.setdefault(precision, {}).setdefault(name, []).append(scores)
    truth = label_truth_of(images, model_set.manifest.num_classes)
    result.num_images, result.num_labels = len(truth), int(truth.sum())
    if not result.num_labels:
        why = f": {result.unreadable[0]}" if result.unreadable else ""
        raise ModelSetError(f"no image of {result.dataset.name} that has a label can be read{why}")
    for precision, of_network in rows.items():
        for name, parts in of_network.items():
            scores = np.concatenate(parts)  # (N, C)
            resampled = measured(scores, truth, threshold)
            result.figures.setdefault(precision, {})[name] = resampled
            is_exact = (above(scores, threshold) == truth).all(axis=1)
            result.num_exact.setdefault(precision, {})[name] = int(is_exact.sum())
    return result


def measured(scores: Probabilities, truth: Labels, threshold: float) -> Resampled:
    """Return the figures of float32 (N, C) scores against (N, C) labels.

    The resamples depend on N alone, so that two classifiers on the same images can be compared.
    """
    parts = [_figures(scores, truth, threshold, counts) for counts in _resamples(len(scores))]
    once = np.ones((1, len(scores)), np.float32)
    return Resampled(_figures(scores, truth, threshold, once), np.concatenate(parts))


def drop_of(before: Resampled, after: Resampled) -> MultiLabelDrop:
    """Return the loss of ``after`` against ``before``, on the same images."""
    lost = (before.values - after.values)[0]
    errors = _standard_errors(before.resamples - after.resamples)
    return MultiLabelDrop(
        mean_average_precision=round(float(lost[0]), 4),
        mean_average_precision_interval=_interval(lost[0], errors[0], -1.0),
        micro_f1=round(float(lost[1]), 4),
        micro_f1_interval=_interval(lost[1], errors[1], -1.0),
    )


def _resamples(num_images: int) -> Iterator[Counts]:
    rng, step = np.random.RandomState(SEED), max(1, MAX_CELLS // num_images)
    for start in range(0, NUM_RESAMPLES, step):
        number = min(step, NUM_RESAMPLES - start)
        drawn = rng.randint(0, num_images, (number, num_images))
        counts = [np.bincount(row, minlength=num_images) for row in drawn]
        yield np.stack(counts).astype(np.float32)


def _figures(scores: Probabilities, truth: Labels, threshold: float, counts: Counts) -> Values:
    """Return mAP, micro and macro F1 of each resample: (R, 3); NaN if no image has a label."""
    answered = above(scores, threshold)
    right = counts @ (answered & truth).astype(np.float32)  # (R, C)
    wrong = counts @ (answered != truth).astype(np.float32)
    with np.errstate(invalid="ignore", divide="ignore"):  # classes without an image
        columns = zip(scores.T, truth.T, strict=True)
        precisions = [average_precision(*column, counts) for column in columns]
        of_class = np.where(counts @ truth.astype(np.float32) > 0, _f1(right, wrong), np.nan)
        micro = _f1(right.sum(axis=1), wrong.sum(axis=1))
        return np.stack([_mean(np.stack(precisions, 1)), micro, _mean(of_class)], 1)


def average_precision(scores: Probabilities, truth: Labels, counts: Counts) -> Values:
    """Return a class's average precision in each resample: (N,) scores and labels to (R,)."""
    order = np.argsort(-scores, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(scores[order])), len(order) - 1)  # ends of ties
    sorted_counts = counts[:, order]
    passed = sorted_counts.cumsum(axis=1, dtype=np.float64)[:, ends]  # (R, steps)
    right = (sorted_counts * truth[order]).cumsum(axis=1, dtype=np.float64)[:, ends]
    more = np.diff(right, axis=1, prepend=0.0)
    precision = np.divide(right, passed, out=np.zeros_like(right), where=passed > 0)
    return np.asarray((more * precision).sum(axis=1) / right[:, -1])


def _f1(right: npt.NDArray[np.float32], wrong: npt.NDArray[np.float32]) -> Values:
    return np.asarray(2 * right.astype(np.float64) / (2 * right + wrong))


def _mean(of_classes: Values) -> Values:
    """Return the mean of (R, C) over the classes that have an image: (R,)."""
    is_there = ~np.isnan(of_classes)
    return np.asarray(np.where(is_there, of_classes, 0).sum(axis=1) / is_there.sum(axis=1))


def _standard_errors(resamples: Values) -> Values:
    return np.asarray(np.nanstd(resamples, axis=0, ddof=1))


def _interval(value: float, error: float, least: float) -> tuple[float, float]:
    low, high = value - Z95 * error, value + Z95 * error
    return round(max(least, float(low)), 4), round(min(1.0, float(high)), 4)
