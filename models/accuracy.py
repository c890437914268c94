"""Accuracy of a model set, as records of its manifest: evaluations, their scores and losses."""

from datetime import date
from math import sqrt
from statistics import NormalDist
from typing import Annotated, NamedTuple

from pydantic import Field

from models.image_colors import IccProfiles
from models.plan import Fraction, NumImages
from models.record import FloatType, ImageRecord, Precision, Record

Z95 = NormalDist().inv_cdf(0.975)
Difference = Annotated[float, Field(ge=-1, le=1)]


class Loss(NamedTuple):
    """The loss of INT8 in one figure, for :mod:`models.ledger`."""

    figure: str
    lost: float  # a fraction
    high: float  # the upper end of its 95 % interval
    p_value: float  # of the hypothesis of no loss, two-sided


class Drop(Record):
    """Float top-1 minus INT8 top-1 on the same images; negative: INT8 was better."""

    top1: Difference
    interval: tuple[Difference, Difference]  # 95 %, of the paired difference
    p_value: Fraction  # McNemar's exact test

    @property
    def losses(self) -> tuple[Loss, ...]:
        """Return the loss of the figure that max_drop limits."""
        return (Loss("top-1", self.top1, self.interval[1], self.p_value),)


class MultiLabelDrop(Record):
    """Float minus INT8 of a multi-label set on the same images; negative: INT8 was better."""

    mean_average_precision: Difference
    mean_average_precision_interval: tuple[Difference, Difference]  # 95 %, of the paired difference
    micro_f1: Difference
    micro_f1_interval: tuple[Difference, Difference]

    @property
    def losses(self) -> tuple[Loss, ...]:
        """Return the losses of the two figures that max_drop limits.

        mAP changes with the order of images, micro F1 with scores that cross the threshold. Either
        may miss a loss that the other shows.
        """
        return (
            _normal_loss("mAP", self.mean_average_precision, self.mean_average_precision_interval),
            _normal_loss("micro-F1", self.micro_f1, self.micro_f1_interval),
        )


class ValidationDrop(Record):
    """A member's loss on the images that ``tandem quantize`` validated it with.

    It can refuse a set but never verify one: the images may be few, they are of one member, and
    accuracy control may have chosen the layers that stay float by these very images.
    """

    dataset: str
    images_sha256: str  # as in AccuracyRecord
    num_images: NumImages
    measured: date
    fingerprint: str  # of the INT8 network
    drop: Drop


class Conditions(Record):
    """The conditions of an evaluation that its figures depend on, besides the networks."""

    image: ImageRecord
    labels_sha256: str  # which class an output stands for
    class_ids_sha256: str | None = None  # which class a dataset's folder stands for
    weights: dict[str, float]  # of each member in the average
    float_type: FloatType = "f32"
    member_images: dict[str, ImageRecord] | None = None  # of members with an own input
    threshold: float | None = None  # of a multi-label set; None: a classification set
    temperatures: dict[str, float] | None = None  # of members and ensemble; None: all are 1
    preprocess: str | None = None  # the set's own function

    def changes(self, now: "Conditions") -> list[str]:
        """Return the names of conditions that differ in ``now``, for people."""
        pairs = {
            "the image rule": ((self.image, self.member_images), (now.image, now.member_images)),
            "labels": (self.labels_sha256, now.labels_sha256),
            "class ids": (self.class_ids_sha256, now.class_ids_sha256),
            "weights of the average": (self.weights, now.weights),
            "the float type": (self.float_type, now.float_type),
            "the threshold": (self.threshold, now.threshold),
            "temperatures": (self.temperatures, now.temperatures),
            "preprocess": (self.preprocess, now.preprocess),
        }
        return [what for what, (before, after) in pairs.items() if before != after]


class MultiLabelScore(Record):
    """One classifier of a multi-label set on one dataset; F1 is at the set's threshold.

    Intervals are 95 %, by resampling the images (calibration/evaluation/evaluate.py).
    """

    mean_average_precision: Fraction  # mAP, over the classes that have an image
    mean_average_precision_interval: tuple[Fraction, Fraction]
    micro_f1: Fraction
    micro_f1_interval: tuple[Fraction, Fraction]
    macro_f1: Fraction
    macro_f1_interval: tuple[Fraction, Fraction]

    @property
    def figure(self) -> tuple[str, float]:
        """Return the name and value of the main figure, mean average precision."""
        return "mAP", self.mean_average_precision


class Score(Record):
    """One classifier on one dataset; fractions of its images."""

    top1: Fraction
    top1_interval: tuple[Fraction, Fraction]  # 95 %, Wilson
    top5: Fraction
    calibration_error: Fraction  # expected calibration error (ECE), 15 bins of confidence

    @property
    def figure(self) -> tuple[str, float]:
        """Return the name and value of the main figure, top-1 accuracy."""
        return "top-1", self.top1


class AccuracyRecord(Record):
    """One evaluation, by ``tandem evaluate``.

    ``fingerprints`` tie it to the networks that it measured and ``conditions`` to all else that its
    figures depend on.
    """

    dataset: str
    images_sha256: str  # a hash over the sorted hashes of the images
    num_images: NumImages
    measured: date
    cpu: str
    int8_kernels: str  # the convolution kernels that OpenVINO chose, which decide how INT8 rounds
    float_type: dict[Precision, str]  # computed by the layers that are not INT8: f32 or bf16
    versions: dict[str, str]
    fingerprints: dict[str, dict[Precision, str]]  # of each member's networks
    conditions: Conditions | None = None  # None for early records
    # Whether wide-gamut pictures became sRGB; the service's setting may be another.
    icc_profiles: IccProfiles = "ignore"
    # By member name or "ensemble".
    scores: dict[Precision, dict[str, Score | MultiLabelScore]]
    # Empty unless both precisions were measured.
    drops: dict[str, Drop | MultiLabelDrop] = Field(default={})
    # Of a network's files, in 10**6 bytes.
    size_mb: dict[str, dict[Precision, float]] = Field(default={})
    # At batch 8, on this CPU.
    cpu_ms_per_image: dict[str, dict[Precision, float]] = Field(default={})


def wilson_interval(part: float, number: int) -> tuple[float, float]:
    """Return the 95 % interval of the proportion ``part / number``, valid near 0 and 1 too.

    From Wilson (1927); ``number`` must not be 0.
    """
    share, spread = part / number, Z95**2 / number
    center = (share + spread / 2) / (1 + spread)
    half = Z95 / (1 + spread) * sqrt(share * (1 - share) / number + spread / 4 / number)
    return max(0.0, center - half), min(1.0, center + half)


def _normal_loss(figure: str, lost: float, interval: tuple[float, float]) -> Loss:
    """Return a loss whose interval is 1.96 standard errors on each side."""
    half = max(interval[1] - lost, lost - interval[0])  # a side may be cut off at 1 or -1
    if not half:
        return Loss(figure, lost, interval[1], 0.0 if lost else 1.0)
    return Loss(figure, lost, interval[1], 2 * NormalDist().cdf(-abs(lost) / half * Z95))
