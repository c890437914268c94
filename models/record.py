"""Records of manifests, strict and frozen: files by hash, images, accuracy; and YAML of people.

PyYAML's safe loader silently takes the second of two equal keys, and raises various Python errors
for a 13th month, a number of 5,000 digits or ten thousand brackets. Here repeated keys and invalid
values are errors with their place.
"""

import hashlib
from datetime import date
from math import sqrt
from pathlib import Path, PurePosixPath
from statistics import NormalDist
from typing import Annotated, Any, Literal, NamedTuple

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from models.errors import TandemError, reading
from models.image import ImageRule, Resize, Size, sides_of, size_of
from models.image_colors import IccProfiles
from models.image_geometry import Interpolation

# FP16: the float network with weights stored as FP16; its FloatType is the type of computation.
Precision = Literal["INT8", "FP16"]
PRECISIONS: tuple[Precision, ...] = ("INT8", "FP16")
# The type in which layers that are not INT8 compute; OpenVINO's names.
FloatType = Literal["f32", "bf16"]
# The meaning of a set's rows: a distribution over classes, or an independent score per class.
Task = Literal["classification", "multi_label"]
# The runtime of a network, which follows from the file's suffix. The package that it needs, and the
# extra of an optional one, have the same name.
RuntimeName = Literal["openvino", "onnxruntime"]
SUFFIXES: dict[RuntimeName, str] = {"openvino": ".xml", "onnxruntime": ".onnx"}
# Runtimes from before sets were converted when added, and their files.
RETIRED = {"torch": ".pt2", "torchscript": ".torchscript"}
LATER_FIELDS = {"resize", "interpolation", "fill"}  # of ImageRecord, absent in the first manifests
MAX_NAME, MAX_PATH = 255, 1000  # bytes of a file's name, characters of its path in a set
_MERGE = "tag:yaml.org,2002:merge"  # the key <<, which may be repeated in a mapping
# Of a member in the average. The bound keeps sums finite; strict: true is not 1.0.
Weight = Annotated[float, Field(gt=0, le=1e6, strict=True)]
# The divisor of logits. The bounds keep float32 rows of many classes from underflowing.
Temperature = Annotated[float, Field(ge=0.2, le=20, strict=True)]
Z95 = NormalDist().inv_cdf(0.975)
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Difference = Annotated[float, Field(ge=-1, le=1)]
NumImages = Annotated[int, Field(ge=1, le=10**9)]  # a float in statistics


class Record(BaseModel):
    """A frozen piece of a manifest; a key nobody knows is an error, not a surprise."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_truth_value(cls, value: object, info: ValidationInfo) -> object:
        """Refuse ``max_drop: true``, which pydantic would read as 1.0, disabling the gate."""
        field = cls.model_fields[info.field_name or ""]
        if isinstance(value, bool) and field.annotation is not bool:
            raise ValueError(f"is {str(value).lower()}, which is no value of this field")
        return value


def _inside_the_set(path: str) -> str:
    """Check that a path may name a file of the set, on any file system."""
    pure = PurePosixPath(path)
    names = [part.encode("utf-8", "surrogatepass") for part in pure.parts]
    if not names or "\0" in path or any("\ud800" <= letter <= "\udfff" for letter in path):
        raise ValueError(f"{path[:40]!r} can be no file's name")
    if len(path) > MAX_PATH or max(map(len, names)) > MAX_NAME:
        raise ValueError(
            f"{path[:40]!r} and more is too long for a file system: a name has at most {MAX_NAME} "
            f"bytes, a path here {MAX_PATH} characters"
        )
    if pure.is_absolute() or ".." in pure.parts:
        raise ValueError(f"{path!r} must be relative to the manifest's folder and stay inside it")
    return path


def _as_written(size: Size) -> Size:
    return size_of(*sides_of(size))


MAX_SIDE = 4096  # px, of a network's input
Side = Annotated[int, Field(ge=1, le=MAX_SIDE)]
# px: the side of a square, or height and width
InputSize = Annotated[Side | tuple[Side, Side], AfterValidator(_as_written)]


class FileRecord(Record):
    """One file of the set, relative to its folder."""

    path: Annotated[str, AfterValidator(_inside_the_set)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

    @classmethod
    def of(cls, folder: Path, path: str) -> "FileRecord":
        """Return the record of a file as it is now."""
        return cls(path=path, sha256=sha256_of(folder / path))


def sha256_of(path: Path) -> str:
    """Return the file's SHA-256 in hexadecimal."""
    with reading(path), path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


class ImageRecord(Record):
    """How bytes become the networks' input; see :class:`models.image.ImageRule`."""

    input_size: InputSize
    resize_shorter: Annotated[int, Field(ge=1, le=8192)]
    color_order: Literal["BGR"] = "BGR"  # OpenCV's; the IR turns it into the network's own
    resize: Resize = "crop"
    interpolation: Interpolation = "bilinear"
    fill: Annotated[int, Field(ge=0, le=255)] = 0  # of borders

    @model_validator(mode="after")
    def _crop_fits(self) -> "ImageRecord":
        _ = self.rule  # which checks it
        return self

    @property
    def rule(self) -> ImageRule:
        return ImageRule(
            self.input_size, self.resize_shorter, self.resize, self.interpolation, self.fill
        )

    @property
    def key(self) -> str:
        """A text that differs between records, without later fields at their defaults."""
        values = self.model_dump(exclude_defaults=True)
        return self.model_dump_json(exclude=LATER_FIELDS - values.keys())


class YamlError(TandemError):
    """A file is not YAML, or not as these files are to be."""

    code = "yaml"


class _StrictLoader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[tuple[str, str]] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
                continue
            if (key.tag, key.value) in keys:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key.value!r} stands twice in one mapping; leave one out",
                    problem_mark=key.start_mark,
                )
            keys.add((key.tag, key.value))
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, TypeError, OverflowError) as error:
            raise yaml.MarkedYAMLError(
                problem=f"{str(node.value)[:40]!r} cannot be read: {error}",
                problem_mark=node.start_mark,
            ) from error


def read_yaml(path: Path) -> Any:
    """Read a file with a single document.

    Raises:
        OSError: the file cannot be read.
        YamlError: it is not YAML in UTF-8, repeats a key, or is nested too deeply.
    """
    try:
        return parse_yaml(path.read_text("utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise YamlError(f"{path} is not YAML: {error}") from error


def parse_yaml(text: str, where: str) -> Any:
    """Parse a document; the :class:`YamlError` is as in :func:`read_yaml` and names ``where``."""
    try:
        return yaml.load(text, _StrictLoader)  # safe, and strict
    except yaml.YAMLError as error:
        raise YamlError(f"{where} is not YAML: {error}") from error
    except RecursionError as error:
        raise YamlError(f"{where} is not YAML as it is read here: nested too deeply") from error


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
