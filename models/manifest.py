"""What a model set says of itself: ``manifest.yaml``, the owner of every fact about the set.

Nothing else in the project knows an input size, a class count or a member's name.
"""

import hashlib
from datetime import date
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from models.errors import ModelSetError
from models.image import ImageRule

MANIFEST_NAME = "manifest.yaml"
Precision = Literal["INT8", "FP16"]


class Record(BaseModel):
    """A frozen piece of a manifest; a key nobody knows is an error, not a surprise."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def _inside_the_set(path: str) -> str:
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts:
        raise ValueError(f"{path!r} must be relative to the manifest's folder and stay inside it")
    return path


class FileRecord(Record):
    """One file of the set, relative to its folder."""

    path: Annotated[str, AfterValidator(_inside_the_set)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

    @classmethod
    def of(cls, folder: Path, path: str) -> "FileRecord":
        """Describe the file as it is now."""
        return cls(path=path, sha256=sha256_of(folder / path))


class Network(Record):
    """One precision of one member: an OpenVINO IR.

    Input uint8 (N, H, W, 3) in the set's colour order; output float32 (N, C) probabilities.
    """

    xml: FileRecord
    bin: FileRecord


class MemberRecord(Record):
    """One network of the ensemble."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,62}$")]
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0  # in the combiner's average
    source: str  # where the float weights came from
    networks: dict[Precision, Network]

    def network(self, precision: Precision) -> Network:
        """Return the IR of ``precision``."""
        if precision not in self.networks:
            there = ", ".join(sorted(self.networks))
            raise ModelSetError(f"member {self.name} has no {precision} network; it has: {there}")
        return self.networks[precision]


class ImageRecord(Record):
    """How bytes become the networks' input; see :class:`models.image.ImageRule`."""

    input_size: Annotated[int, Field(ge=1, le=4096)]
    resize_shorter: Annotated[int, Field(ge=1, le=8192)]
    color_order: Literal["BGR"] = "BGR"  # OpenCV's; the IR turns it into the network's own

    @model_validator(mode="after")
    def _crop_fits(self) -> "ImageRecord":
        if self.resize_shorter < self.input_size:
            raise ValueError(
                f"resize_shorter {self.resize_shorter} is under input_size {self.input_size}: "
                "the centre crop would not fit"
            )
        return self

    @property
    def rule(self) -> ImageRule:
        return ImageRule(input_size=self.input_size, resize_shorter=self.resize_shorter)


class AccuracyRecord(Record):
    """Top-1 of each member and of the average, measured by ``python -m calibration.bundle``."""

    dataset: str
    num_images: int
    precision: Precision
    float_type: str  # of the layers that are not INT8 as they ran: f32 or bf16
    measured: date
    top1: dict[str, float]  # member name or "ensemble" -> fraction
    cpu: str
    versions: dict[str, str]


class Manifest(Record):
    """The whole of ``manifest.yaml``."""

    schema_version: Literal[1] = 1
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
    description: str
    image: ImageRecord
    num_classes: Annotated[int, Field(ge=2)]
    labels: FileRecord
    members: Annotated[tuple[MemberRecord, ...], Field(min_length=1)]
    accuracy: tuple[AccuracyRecord, ...] = ()
    hint: str = ""  # shown to people beside the classes, such as how to get more of them

    @model_validator(mode="after")
    def _names_differ(self) -> "Manifest":
        names = [member.name for member in self.members]
        if len(set(names)) != len(names):
            raise ValueError(f"members must have different names, not {names}")
        return self

    @property
    def files(self) -> tuple[FileRecord, ...]:
        """Every file the set consists of, besides the manifest itself."""
        networks = [n for member in self.members for n in member.networks.values()]
        return (self.labels, *(f for n in networks for f in (n.xml, n.bin)))


def sha256_of(path: Path) -> str:
    """Return the file's SHA-256 in hexadecimal."""
    try:
        with path.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise ModelSetError(f"cannot read {path}: {error.strerror}") from error


def read_manifest(folder: Path) -> Manifest:
    """Read ``folder/manifest.yaml``; every mistake in it is named with its place."""
    path = folder / MANIFEST_NAME
    try:
        content = yaml.safe_load(path.read_text("utf-8"))
        return Manifest.model_validate(content)
    except OSError as error:
        raise ModelSetError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ModelSetError(f"{path} is not YAML: {error}") from error
    except ValidationError as error:
        places = [f"{'.'.join(map(str, e['loc'])) or 'top'}: {e['msg']}" for e in error.errors()]
        raise ModelSetError(f"{path}: " + "; ".join(places)) from error


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest in one step, so that no reader ever sees half of it."""
    partial = folder / f"{MANIFEST_NAME}.partial"
    content = manifest.model_dump(mode="json", exclude_defaults=False)
    partial.write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True), "utf-8")
    partial.replace(folder / MANIFEST_NAME)
