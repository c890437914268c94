"""Records of manifests, strict and frozen: files by hash, images; and YAML that people write.

PyYAML's safe loader silently takes the second of two equal keys, and raises various Python errors
for a 13th month, a number of 5,000 digits or ten thousand brackets. Here repeated keys and invalid
values are errors with their place.
"""

import hashlib
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

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
