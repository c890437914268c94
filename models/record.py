"""Strict frozen records for manifests, and files identified by hash."""

import hashlib
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from models.errors import ModelSetError

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
        """Return the record of a file as it is now."""
        return cls(path=path, sha256=sha256_of(folder / path))


def sha256_of(path: Path) -> str:
    """Return the file's SHA-256 in hexadecimal."""
    try:
        with path.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise ModelSetError(f"cannot read {path}: {error.strerror}") from error
