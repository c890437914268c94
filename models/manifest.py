"""``manifest.yaml``: everything that a model set says of itself.

Nothing else in the project knows an input size, a class count or a member's name.
"""

import hashlib
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, Field, ValidationError, field_validator, model_validator

from models.accuracy import ENSEMBLE, AccuracyRecord, Conditions, SureRecord, ValidationDrop
from models.answer_rule import DEFAULT_THRESHOLD
from models.errors import ModelSetError
from models.image_inputs import ImageInputs
from models.image_record import ImageRecord
from models.record import (
    RETIRED,
    SUFFIXES,
    FileRecord,
    FloatType,
    Precision,
    Record,
    RuntimeName,
    Task,
    Temperature,
    Weight,
)
from models.strict_yaml import YamlError, read_yaml

MANIFEST_NAME = "manifest.yaml"
MAX_MEMBERS = 8


class Network(Record):
    """One precision of one member: a graph for its runtime.

    Input uint8 (N, H, W, 3) BGR at the member's size; output float32 (N, C) in 0..1, as the set's
    task has them: rows that sum to one, or a score for each class by itself. For OpenVINO an IR,
    which is two files (``xml`` and ``bin``); for ONNX Runtime one ``file``.
    """

    runtime: RuntimeName = "openvino"
    xml: FileRecord | None = None
    bin: FileRecord | None = None
    file: FileRecord | None = None  # .onnx with all its weights

    @field_validator("runtime", mode="before")
    @classmethod
    def _is_run_still(cls, given: Any) -> Any:
        if (suffix := RETIRED.get(str(given))) is not None:
            raise ValueError(
                f"{given} runs no members any more: openvino and onnxruntime do. Add the set anew "
                f"from what it was made of, or from its own {suffix} files, which are converted: "
                "tandem models add NAME --member MEMBER=FILE --labels labels.txt --trust (it runs "
                "code of the file)"
            )
        return given

    @model_validator(mode="after")
    def _files_are_the_runtimes_own(self) -> "Network":
        """OpenVINO takes the weights beside the .xml, whatever a manifest says: check those."""
        if self.runtime != "openvino":
            return self._with_one_file()
        if self.xml is None or self.bin is None or self.file is not None:
            raise ValueError("an OpenVINO network is xml and bin; file is for onnxruntime")
        xml = PurePosixPath(self.xml.path)
        if xml.suffix != ".xml" or PurePosixPath(self.bin.path) != xml.with_suffix(".bin"):
            raise ValueError(
                f"bin is {self.bin.path!r}, but OpenVINO loads the weights of {self.xml.path!r} "
                f"from {str(xml.with_suffix('.bin'))!r}: xml must end in .xml, bin be that file"
            )
        return self

    def _with_one_file(self) -> "Network":
        suffix = SUFFIXES[self.runtime]
        if self.file is None or self.xml is not None or self.bin is not None:
            raise ValueError(f"a network of runtime {self.runtime} is one file, a {suffix}")
        if PurePosixPath(self.file.path).suffix != suffix:
            raise ValueError(f"{self.file.path!r} is for {self.runtime}: it must end in {suffix}")
        return self

    @property
    def files(self) -> tuple[FileRecord, ...]:
        """Its files; the runtime opens the first one."""
        return tuple(f for f in (self.xml, self.bin, self.file) if f is not None)

    @property
    def fingerprint(self) -> str:
        """A short hash that changes with any of its files."""
        hashes = "".join(file.sha256 for file in self.files)
        return hashlib.sha256(hashes.encode()).hexdigest()[:16]


class QuantizationOptions(Record):
    """How NNCF makes a member's INT8 network; the names are NNCF's own."""

    # mixed: symmetric weights, activations as their range is (ReLU wastes half a symmetric one).
    preset: Literal["mixed", "performance"] = "mixed"
    subset_size: Annotated[int, Field(ge=1)] = 300  # calibration images
    ignored_names: tuple[str, ...] = ()  # of operations that stay float
    ignored_types: tuple[str, ...] = ()  # of operations that stay float, such as Multiply
    fast_bias_correction: bool = True
    # What NNCF takes the network for; transformer: smooth quantisation, activations by attention's
    # needs. None: as its graph says (tandem quantize writes what it took).
    model_type: Literal["convolutional", "transformer"] | None = None


class MemberRecord(Record):
    """One network of the ensemble."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,62}$")]
    weight: Weight = 1.0  # in the combiner's average
    temperature: Temperature = 1.0  # of its probabilities; tandem evaluate --calibrate fits it
    source: str  # where the weights came from
    networks: dict[Precision, Network]
    image: ImageRecord | None = None  # its own input, if that is not the set's
    # Images in a batch, where the network was exported for that many and cannot be reshaped.
    fixed_batch: Annotated[int, Field(ge=1)] | None = None
    imported_int8: bool = False  # its INT8 network came so, and no float one with it
    quantization: QuantizationOptions = QuantizationOptions()
    left_float: tuple[str, ...] = ()  # layers that accuracy control kept from INT8
    validation_drop: ValidationDrop | None = None  # as tandem quantize measured it, if it did

    @model_validator(mode="after")
    def _name_is_free(self) -> "MemberRecord":
        if self.name == "ensemble":
            raise ValueError("a member cannot be called ensemble: that is the average of all")
        return self

    @property
    def runtimes(self) -> tuple[RuntimeName, ...]:
        """What runs its networks, each once."""
        return tuple(dict.fromkeys(network.runtime for network in self.networks.values()))

    def precision_of(self, precision: Precision) -> Precision:
        """Return what is run where ``precision`` is asked for.

        A member on another runtime than OpenVINO with one network runs that: tandem quantize makes
        INT8 for OpenVINO alone, and the others of its set need not be float for it.
        """
        (first, *more) = self.networks or (precision,)
        is_only = not more and first in self.networks
        return first if is_only and self.networks[first].runtime != "openvino" else precision

    def network(self, precision: Precision) -> Network:
        """Return the network that is run where ``precision`` is asked for."""
        precision = self.precision_of(precision)
        if precision not in self.networks:
            there = ", ".join(sorted(self.networks))
            how = "; tandem quantize makes INT8 of a float network" if precision == "INT8" else ""
            raise ModelSetError(
                f"member {self.name} has no {precision} network; it has: {there}{how}"
            )
        return self.networks[precision]


class Made(Record):
    """What made this version of a set, and when; not part of what the version is."""

    by: str  # a command
    at: AwareDatetime


class Manifest(Record):
    """The whole of ``manifest.yaml``."""

    schema_version: Literal[1] = 1
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
    description: str
    image: ImageRecord  # of the members that have none of their own
    task: Task = "classification"
    # Of multi_label, and of nothing else: an answer lists the labels whose score is this or more.
    threshold: Annotated[float, Field(gt=0, lt=1)] | None = None
    temperature: Temperature = 1.0  # of the average of all members
    sure: SureRecord | None = None  # when an answer is; tandem evaluate --sure-at measures it
    num_classes: Annotated[int, Field(ge=2)]
    labels: FileRecord  # one per line, in the networks' order
    class_ids: FileRecord | None = None  # the same, as datasets name their folders (WordNet ids)
    members: Annotated[tuple[MemberRecord, ...], Field(min_length=1, max_length=MAX_MEMBERS)]
    # What layers that are not INT8 compute in; bf16 where the CPU has it, else f32.
    float_type: FloatType = "f32"
    # INT8 may cost a member, or the ensemble, this much top-1 (a fraction): more is not served.
    max_drop: Annotated[float, Field(ge=0, le=1)] = 0.005
    calibration: FileRecord | None = None  # sha256 of each image that INT8 was fitted to
    calibration_source: str = ""  # which images, if they came with packages
    golden: FileRecord | None = None  # what each network answers to generated images
    accuracy: tuple[AccuracyRecord, ...] = ()
    hint: str = ""  # shown to people beside the classes, such as how to get more of them
    license: str = ""  # of the weights, an SPDX identifier; empty: not stated
    made: Made | None = None
    training_data: str = ""  # what they were trained on, and whose terms that has

    @model_validator(mode="after")
    def _names_differ(self) -> "Manifest":
        names = [member.name for member in self.members]
        if len(set(names)) != len(names):
            raise ValueError(f"members must have different names, not {names}")
        return self

    @model_validator(mode="before")
    @classmethod
    def _has_a_threshold(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("task") == "multi_label":
            return {"threshold": DEFAULT_THRESHOLD, **given}
        return given

    @model_validator(mode="after")
    def _threshold_is_of_scores(self) -> "Manifest":
        if (self.threshold is not None) != (self.task == "multi_label"):
            raise ValueError(
                f"threshold is {self.threshold} and task {self.task}: a multi_label set has a "
                "threshold, above 0 and below 1, and no other set has one"
            )
        if self.task == "multi_label" and set(self.temperatures.values()) != {1.0}:
            raise ValueError("a temperature is of classes that exclude each other: not multi_label")
        if self.task == "multi_label" and self.sure is not None:
            raise ValueError("sure is of classes that exclude each other: not multi_label")
        return self

    @property
    def conditions(self) -> Conditions:
        """What accuracy depends on besides the networks, as it is now."""
        return Conditions(
            image=self.image,
            labels_sha256=self.labels.sha256,
            class_ids_sha256=self.class_ids.sha256 if self.class_ids else None,
            weights={member.name: member.weight for member in self.members},
            float_type=self.float_type,
            member_images={m.name: m.image for m in self.members if m.image} or None,
            threshold=self.threshold,
            temperatures=self.temperatures if set(self.temperatures.values()) != {1.0} else None,
        )

    @property
    def temperatures(self) -> dict[str, float]:
        """Return each member's temperature, and the average's."""
        return {m.name: m.temperature for m in self.members} | {ENSEMBLE: self.temperature}

    @property
    def inputs(self) -> ImageInputs:
        """How a picture becomes the members' inputs."""
        return ImageInputs({m.name: self.image_of(m.name).rule for m in self.members})

    def image_of(self, name: str) -> ImageRecord:
        """Return the image record of a member: its own, or the set's."""
        return self.member(name).image or self.image

    @property
    def files(self) -> tuple[FileRecord, ...]:
        """Every file the set consists of, besides the manifest itself."""
        networks = [n for member in self.members for n in member.networks.values()]
        optional = (self.class_ids, self.calibration, self.golden)
        extra = [record for record in optional if record is not None]
        return (self.labels, *extra, *(f for n in networks for f in n.files))

    def member(self, name: str) -> MemberRecord:
        """Return the member called ``name``, or raise with the names there are."""
        for record in self.members:
            if record.name == name:
                return record
        there = ", ".join(record.name for record in self.members)
        raise ModelSetError(f"model set {self.name} has no member {name!r}; it has: {there}")


def read_manifest(folder: Path) -> Manifest:
    """Read ``folder/manifest.yaml``; every mistake in it is named with its place."""
    path = folder / MANIFEST_NAME
    try:
        return Manifest.model_validate(read_yaml(path))
    except OSError as error:
        raise ModelSetError(f"cannot read {path}: {error.strerror}") from error
    except YamlError as error:
        raise ModelSetError(error.message) from error
    except ValidationError as error:
        places = [f"{'.'.join(map(str, e['loc'])) or 'top'}: {e['msg']}" for e in error.errors()]
        raise ModelSetError(f"{path}: " + "; ".join(places)) from error
