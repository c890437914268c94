"""Evaluates a multi-label set: mean average precision, micro and macro F1, float and INT8.

Average precision of a class is the mean of the precision at each of its images, with images sorted
by the class's score (ties are a single step). mAP is its mean over the classes that have an image.
Micro F1 counts all labels of all images together; macro F1 is the mean over those classes.
Intervals are the estimate and 1.96 standard errors, from 200 resamples of the images (bootstrap;
Efron and Tibshirani 1993: 50 to 200 are enough for a standard error).

Scores are kept until the end, 4 bytes per image, class and network, since average precision needs
their order over all images.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from calibration.datasets import LabelSets, MultiLabelledImage, label_truth_of
from calibration.evaluation.evaluate import check_not_calibrated
from calibration.evaluation.inference import Networks, Observer, Track
from models.accuracy import Z95, Drop, MultiLabelDrop, MultiLabelScore, Score
from models.ensemble import Probabilities, above
from models.errors import ModelSetError
from models.model_set import ModelSet
from models.record import Precision

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
