"""Accuracy as a manifest keeps it: whole evaluations, and the drops that quantising measured."""

import hashlib
from collections.abc import Iterable
from datetime import date
from typing import Annotated

from pydantic import Field

from models.image_record import ImageRecord
from models.record import FloatType, Precision, Record

ENSEMBLE = "ensemble"  # the combiner's average, beside the members' names
Fraction = Annotated[float, Field(ge=0, le=1)]
Difference = Annotated[float, Field(ge=-1, le=1)]


class Score(Record):
    """One classifier on one dataset; fractions of its images."""

    top1: Fraction
    top1_interval: tuple[Fraction, Fraction]  # 95 %, Wilson
    top5: Fraction
    calibration_error: Fraction  # expected calibration error (ECE), 15 bins of confidence

    @property
    def figure(self) -> tuple[str, float]:
        """Return the figure that a classifier is known by, and its name."""
        return "top-1", self.top1


class MultiLabelScore(Record):
    """One classifier of a multi-label set on one dataset; F1 is at the set's threshold.

    Intervals are 95 %, by resampling the images (calibration/evaluation/multi_label/figures.py).
    """

    mean_average_precision: Fraction  # mAP, over the classes that have an image
    mean_average_precision_interval: tuple[Fraction, Fraction]
    micro_f1: Fraction
    micro_f1_interval: tuple[Fraction, Fraction]
    macro_f1: Fraction
    macro_f1_interval: tuple[Fraction, Fraction]

    @property
    def figure(self) -> tuple[str, float]:
        """Return the figure that a classifier is known by, and its name."""
        return "mAP", self.mean_average_precision


class Drop(Record):
    """Float top-1 minus INT8 top-1 on the same images; negative: INT8 was better."""

    top1: Difference
    interval: tuple[Difference, Difference]  # 95 %, of the paired difference
    p_value: Fraction  # McNemar's exact test

    @property
    def worst(self) -> tuple[str, float]:
        """Return the figure that max_drop is of, and what was lost of it."""
        return "top-1", self.top1


class MultiLabelDrop(Record):
    """Float minus INT8 of a multi-label set on the same images; negative: INT8 was better."""

    mean_average_precision: Difference
    mean_average_precision_interval: tuple[Difference, Difference]  # 95 %, of the paired difference
    micro_f1: Difference
    micro_f1_interval: tuple[Difference, Difference]

    @property
    def worst(self) -> tuple[str, float]:
        """Return the figure that max_drop is of, and what was lost of it.

        mAP sees an order of images that changed, micro F1 scores that crossed the threshold: either
        may hide what the other shows, so the larger loss counts.
        """
        lost = {"mAP": self.mean_average_precision, "micro-F1": self.micro_f1}
        name = max(lost, key=lost.__getitem__)
        return name, lost[name]


class ValidationDrop(Record):
    """What one member lost on the images that ``tandem quantize`` validated it with.

    It can refuse a set but never verify one: the images may be few, they are of one member, and
    accuracy control may have chosen the layers that stay float by these very images.
    """

    dataset: str
    images_sha256: str  # as in AccuracyRecord
    num_images: Annotated[int, Field(ge=1)]
    measured: date
    fingerprint: str  # of the INT8 network
    drop: Drop


class Conditions(Record):
    """What an evaluation's figures depend on besides the networks themselves."""

    image: ImageRecord
    labels_sha256: str  # which class an output is
    class_ids_sha256: str | None = None  # which class a dataset's folder is
    weights: dict[str, float]  # of each member in the average
    float_type: FloatType = "f32"
    member_images: dict[str, ImageRecord] | None = None  # of members whose input is their own
    threshold: float | None = None  # of a multi-label set; None: a classification set

    def changes(self, now: "Conditions") -> list[str]:
        """Name what is otherwise in ``now``, for people."""
        pairs = {
            "the image rule": (
                (self.image, self.member_images),
                (now.image, now.member_images),
            ),
            "labels": (self.labels_sha256, now.labels_sha256),
            "class ids": (self.class_ids_sha256, now.class_ids_sha256),
            "weights of the average": (self.weights, now.weights),
            "the float type": (self.float_type, now.float_type),
            "the threshold": (self.threshold, now.threshold),
        }
        return [what for what, (before, after) in pairs.items() if before != after]


class AccuracyRecord(Record):
    """One evaluation, by ``tandem evaluate``.

    ``fingerprints`` tie it to the networks that it measured and ``conditions`` to all else that its
    figures depend on.
    """

    dataset: str
    images_sha256: str  # over the sorted hashes of the images: the same images, the same value
    num_images: Annotated[int, Field(ge=1)]
    measured: date
    cpu: str
    int8_kernels: str  # the convolution kernels OpenVINO chose: they decide how INT8 rounds
    float_type: dict[Precision, str]  # what the layers that are not INT8 ran in: f32 or bf16
    versions: dict[str, str]
    fingerprints: dict[str, dict[Precision, str]]  # of each member's networks
    conditions: Conditions | None = None  # None: recorded before they were noted
    # By member name or "ensemble".
    scores: dict[Precision, dict[str, Score | MultiLabelScore]]
    drops: dict[str, Drop | MultiLabelDrop] = Field(
        default={}
    )  # empty unless float and INT8 were both measured
    size_mb: dict[str, dict[Precision, float]] = Field(
        default={}
    )  # files of a network, in 10**6 bytes
    cpu_ms_per_image: dict[str, dict[Precision, float]] = Field(
        default={}
    )  # at batch 8, on this CPU


def images_digest(sha256s: Iterable[str]) -> str:
    """Return one hash over the hashes of images, whatever their order: ``images_sha256``."""
    return hashlib.sha256("".join(sorted(sha256s)).encode()).hexdigest()
