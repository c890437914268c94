"""Evaluates a multi-label set: each member and the ensemble, float and INT8.

Scores are kept until the end, 4 bytes per image, class and network, since average precision needs
their order over all images.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from calibration.datasets import LabelSets, MultiLabelledImage, label_truth_of
from calibration.evaluation.evaluate import check_not_calibrated
from calibration.evaluation.inference import Networks, Observer, Track
from calibration.evaluation.multi_label.figures import Labels, Resampled, drop_of, measured
from models.accuracy import Drop, MultiLabelDrop, MultiLabelScore, Score
from models.answer_rule import above
from models.ensemble import Probabilities
from models.errors import ModelSetError
from models.model_set import ModelSet
from models.record import Precision


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

    ``observe`` is called with each batch, in the thread that ran it.

    Raises:
        ModelSetError: an image was used for calibration, or none with a label can be read.

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
    _measure(result, rows, label_truth_of(images, model_set.manifest.num_classes))
    return result


def _measure(
    result: MultiLabelEvaluation,
    rows: dict[Precision, dict[str, list[Probabilities]]],
    truth: Labels,
) -> None:
    """Add the figures of all rows to the result."""
    result.num_images, result.num_labels = len(truth), int(truth.sum())
    if not result.num_labels:
        why = f": {result.unreadable[0]}" if result.unreadable else ""
        raise ModelSetError(f"no image of {result.dataset.name} that has a label can be read{why}")
    for precision, by_name in rows.items():
        for name, parts in by_name.items():
            scores = np.concatenate(parts)  # (N, C)
            resampled = measured(scores, truth, result.threshold)
            result.figures.setdefault(precision, {})[name] = resampled
            is_exact = (above(scores, result.threshold) == truth).all(axis=1)
            result.num_exact.setdefault(precision, {})[name] = int(is_exact.sum())
