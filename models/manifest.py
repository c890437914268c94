"""``manifest.yaml``: all properties of a model set, with the accuracy that was measured.

No other file of the project defines an input size, a number of classes or a member's name. Accuracy
is kept as whole evaluations, and as the drops that quantising measured.
"""

import hashlib
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, Field, ValidationError, field_validator, model_validator

from models.ensemble import (
    DEFAULT_THRESHOLD,
    AnswerSetRecord,
    AverageRecord,
    PlanRecord,
    SubsetRecord,
    SureRecord,
    TrustTable,
)
from models.errors import ModelSetError, reading
from models.image import ImageInputs
from models.record import (
    PRECISIONS,
    RETIRED,
    SUFFIXES,
    AccuracyRecord,
    Conditions,
    FileRecord,
    FloatType,
    ImageRecord,
    Precision,
    Record,
    RuntimeName,
    Task,
    Temperature,
    ValidationDrop,
    Weight,
    YamlError,
    read_yaml,
)

MANIFEST_NAME = "manifest.yaml"
MAX_MEMBERS = 8
ENSEMBLE = "ensemble"  # the combiner's average, next to the members' names


class Network(Record):
    """One precision of one member: a graph for its runtime.

    Input uint8 (N, H, W, 3) BGR at the member's size; output float32 (N, C) in 0..1, as the set's
    task has them: rows that sum to one, or a score for each class by itself. For OpenVINO an IR,
    which is two files (``xml`` and ``bin``); for ONNX Runtime one ``file``.
    """

    runtime: RuntimeName = "openvino"
    xml: FileRecord | None = None
    bin: FileRecord | None = None
    file: FileRecord | None = None  # .onnx with all weights in it
    features: Annotated[int, Field(ge=1)] | None = None  # of its embedding; None: it may have none

    @field_validator("runtime", mode="before")
    @classmethod
    def _is_run_still(cls, runtime: Any) -> Any:
        if (suffix := RETIRED.get(str(runtime))) is not None:
            raise ValueError(
                f"{runtime} runs no members any more: openvino and onnxruntime do. Add the set "
                f"anew from what it was made of, or from its own {suffix} files, which are "
                "converted: tandem models add NAME --member MEMBER=FILE --labels labels.txt "
                "--trust (it runs code of the file)"
            )
        return runtime

    @model_validator(mode="after")
    def _files_are_the_runtimes_own(self) -> "Network":
        """Check both files: OpenVINO always takes the weights next to the .xml."""
        if self.runtime != "openvino":
            suffix = SUFFIXES[self.runtime]
            if self.file is None or self.xml is not None or self.bin is not None:
                raise ValueError(f"a network of runtime {self.runtime} is one file, a {suffix}")
            if PurePosixPath(self.file.path).suffix != suffix:
                raise ValueError(
                    f"{self.file.path!r} is for {self.runtime}: it must end in {suffix}"
                )
            return self
        if self.xml is None or self.bin is None or self.file is not None:
            raise ValueError("an OpenVINO network is xml and bin; file is for onnxruntime")
        xml = PurePosixPath(self.xml.path)
        if xml.suffix != ".xml" or PurePosixPath(self.bin.path) != xml.with_suffix(".bin"):
            raise ValueError(
                f"bin is {self.bin.path!r}, but OpenVINO loads the weights of {self.xml.path!r} "
                f"from {str(xml.with_suffix('.bin'))!r}: xml must end in .xml, bin be that file"
            )
        return self

    @property
    def files(self) -> tuple[FileRecord, ...]:
        """All files; the runtime opens the first."""
        return tuple(f for f in (self.xml, self.bin, self.file) if f is not None)

    @property
    def fingerprint(self) -> str:
        """A short hash over all files."""
        hashes = "".join(file.sha256 for file in self.files)
        return hashlib.sha256(hashes.encode()).hexdigest()[:16]


class QuantizationOptions(Record):
    """How NNCF makes a member's INT8 network; the names are NNCF's own."""

    # mixed: symmetric weights, activations by their range (ReLU wastes half of a symmetric one)
    preset: Literal["mixed", "performance"] = "mixed"
    subset_size: Annotated[int, Field(ge=1)] = 300  # calibration images
    ignored_names: tuple[str, ...] = ()  # of operations that stay float
    ignored_types: tuple[str, ...] = ()  # of operations that stay float, such as Multiply
    fast_bias_correction: bool = True
    # The kind of network for NNCF; transformer: smooth quantisation, and activations as attention
    # needs. None: by its graph (tandem quantize then writes it down).
    model_type: Literal["convolutional", "transformer"] | None = None


class MemberRecord(Record):
    """One network of the ensemble."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,62}$")]
    weight: Weight = 1.0  # in the combiner's average
    temperature: Temperature = 1.0  # of its probabilities; tandem evaluate --calibrate fits it
    source: str  # the weights' origin
    networks: dict[Precision, Network]
    image: ImageRecord | None = None  # of its own input; None: the set's
    # The batch size, if the network was exported with it and cannot be reshaped.
    fixed_batch: Annotated[int, Field(ge=1)] | None = None
    imported_int8: bool = False  # it was imported as INT8, without a float network
    quantization: QuantizationOptions = QuantizationOptions()
    left_float: tuple[str, ...] = ()  # layers that accuracy control kept float
    validation_drop: ValidationDrop | None = None  # measured by tandem quantize

    @model_validator(mode="after")
    def _name_is_free(self) -> "MemberRecord":
        if self.name == ENSEMBLE:
            raise ValueError("a member cannot be called ensemble: that is the average of all")
        return self

    @property
    def runtimes(self) -> tuple[RuntimeName, ...]:
        """The runtimes of its networks, without repetition."""
        return tuple(dict.fromkeys(network.runtime for network in self.networks.values()))

    def precision_of(self, precision: Precision) -> Precision:
        """Return the precision that the member runs if ``precision`` is requested.

        A member with a single network on another runtime than OpenVINO runs that: tandem quantize
        only makes INT8 for OpenVINO, and the set's other members need not be float because of it.
        """
        (first, *more) = self.networks or (precision,)
        is_only = not more and first in self.networks
        return first if is_only and self.networks[first].runtime != "openvino" else precision

    def network(self, precision: Precision) -> Network:
        """Return the network that runs if ``precision`` is requested."""
        precision = self.precision_of(precision)
        if precision not in self.networks:
            there = ", ".join(sorted(self.networks))
            there += "; tandem quantize makes INT8 of a float network" * (precision == "INT8")
            raise ModelSetError(f"member {self.name} has no {precision} network; it has: {there}")
        return self.networks[precision]


class Made(Record):
    """The command and time that made this version of a set; not part of its fingerprint."""

    by: str  # a command
    at: AwareDatetime


class Manifest(Record):
    """The whole of ``manifest.yaml``."""

    schema_version: Literal[1] = 1
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
    description: str
    image: ImageRecord  # of members without their own
    task: Task = "classification"
    # Only for multi_label: an answer lists labels with at least this score.
    threshold: Annotated[float, Field(gt=0, lt=1)] | None = None
    temperature: Temperature = 1.0  # of the average of all members
    sure: SureRecord | None = None  # bound of sure answers, by tandem evaluate --sure-at
    answer_set: AnswerSetRecord | None = None  # of all members; by the same
    trust: tuple[SubsetRecord, ...] = ()  # of averages of some members; by the same
    fast_plan: PlanRecord | None = None  # by tandem evaluate --plan
    num_classes: Annotated[int, Field(ge=2)]
    labels: FileRecord  # one per line, in the networks' order
    class_ids: FileRecord | None = None  # names of datasets' folders (WordNet ids), in that order
    members: Annotated[tuple[MemberRecord, ...], Field(min_length=1, max_length=MAX_MEMBERS)]
    # Computed by layers that are not INT8; bf16 only on CPUs that support it.
    float_type: FloatType = "f32"
    # A function on pixels between decoding and the members, package.module:function. It runs only
    # where its name is allowed (models/own_functions.py).
    preprocess: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")] | None = None
    # The top-1 (a fraction) that INT8 may cost a member or the ensemble; more is not served.
    max_drop: Annotated[float, Field(ge=0, le=1)] = 0.005
    calibration: FileRecord | None = None  # sha256 of each image that INT8 was calibrated with
    calibration_source: str = ""  # their origin, if they came with packages
    golden: FileRecord | None = None  # the networks' answers to generated images
    # What tandem learn made the set from: the sha256, class and name of each photograph.
    photographs: FileRecord | None = None
    accuracy: tuple[AccuracyRecord, ...] = ()
    hint: str = ""  # shown next to the classes, for example how to get more of them
    license: str = ""  # of the weights, an SPDX identifier; empty: not stated
    made: Made | None = None
    training_data: str = ""  # its data set, and the terms of that

    @model_validator(mode="after")
    def _names_differ(self) -> "Manifest":
        names = [member.name for member in self.members]
        if len(set(names)) != len(names):
            raise ValueError(f"members must have different names, not {names}")
        return self

    @model_validator(mode="before")
    @classmethod
    def _has_a_threshold(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("task") == "multi_label":
            return {"threshold": DEFAULT_THRESHOLD, **values}
        return values

    @model_validator(mode="after")
    def _threshold_is_of_scores(self) -> "Manifest":
        if (self.threshold is not None) != self.is_multi_label:
            raise ValueError(
                f"threshold is {self.threshold} and task {self.task}: a multi_label set has a "
                "threshold, above 0 and below 1, and no other set has one"
            )
        if self.is_multi_label and set(self.temperatures.values()) != {1.0}:
            raise ValueError("a temperature is of classes that exclude each other: not multi_label")
        for what in ("sure", "answer_set", "trust", "fast_plan"):
            if self.is_multi_label and getattr(self, what):
                raise ValueError(f"{what} is of classes that exclude each other: not multi_label")
        return self

    @model_validator(mode="after")
    def _averages_are_of_its_members(self) -> "Manifest":
        own = self.weights
        for names, what in (
            *((subset.members, "trust") for subset in self.trust),
            (self.fast_plan.members if self.fast_plan else (), "fast_plan"),
        ):
            if unknown := next((name for name in names if name not in own), None):
                raise ValueError(
                    f"{what} names {unknown!r}, no member of the set; it has: {', '.join(own)}"
                )
        return self

    @property
    def conditions(self) -> Conditions:
        """The present conditions that accuracy depends on, besides the networks."""
        return Conditions(
            image=self.image,
            labels_sha256=self.labels.sha256,
            class_ids_sha256=self.class_ids.sha256 if self.class_ids else None,
            weights=self.weights,
            float_type=self.float_type,
            member_images={m.name: m.image for m in self.members if m.image} or None,
            threshold=self.threshold,
            temperatures=self.temperatures if set(self.temperatures.values()) != {1.0} else None,
            preprocess=self.preprocess,
        )

    @property
    def is_multi_label(self) -> bool:
        """Whether the classes do not exclude each other."""
        return self.task == "multi_label"

    @property
    def weights(self) -> dict[str, float]:
        """Return each member's weight in the average, in the manifest's order."""
        return {member.name: member.weight for member in self.members}

    @property
    def temperatures(self) -> dict[str, float]:
        """Return each member's temperature, and the ensemble's."""
        return {m.name: m.temperature for m in self.members} | {ENSEMBLE: self.temperature}

    @property
    def inputs(self) -> ImageInputs:
        """The conversion of a picture to the members' inputs."""
        return ImageInputs({m.name: self.image_of(m.name).rule for m in self.members})

    def image_of(self, name: str) -> ImageRecord:
        """Return a member's image record: its own, or the set's."""
        return self.member(name).image or self.image

    @property
    def files(self) -> tuple[FileRecord, ...]:
        """All files of the set, except the manifest."""
        networks = [n for member in self.members for n in member.networks.values()]
        optional = filter(None, (self.class_ids, self.calibration, self.golden, self.photographs))
        return (self.labels, *optional, *(f for n in networks for f in n.files))

    def fingerprint(self, precision: Precision = "INT8") -> str:
        """Return the set's version: twelve hexadecimal digits that identify its answers.

        They cover the image rule, labels, networks, weights and float type, the threshold of a
        multi-label set, the bounds of sure answers and answer sets, and the fast plan.
        """
        parts = [self.name, self.image.key, self.labels.sha256, self.float_type]
        parts += [] if self.threshold is None else [f"{self.task} {self.threshold!r}"]
        parts += [repr(self.temperatures)] if self.conditions.temperatures else []
        parts += [f"preprocess {self.preprocess}"] if self.preprocess else []
        parts += [f"sure {self.sure.probability!r}"] if self.sure else []
        parts += [f"set {self.answer_set.probability!r}"] if self.answer_set else []
        for subset in self.trust:
            bound = subset.sure and subset.sure.probability
            parts += [f"{subset.members} {subset.temperature!r} {bound!r}"]
        parts += [f"plan {self.fast_plan.key}"] if self.fast_plan else []
        for member in self.members:
            network = member.network(precision)
            parts += [member.name, repr(member.weight), *(f.sha256 for f in network.files)]
            parts += [member.image.key] if member.image else []
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]

    def plan_key(self, precision: Precision) -> str:
        """Return a short hash of all that a plan is chosen with: it fits no other networks.

        That is the precision's networks, and what makes probabilities of their outputs.
        """
        parts = [precision, self.image.key, self.labels.sha256, self.float_type]
        parts += [f"preprocess {self.preprocess}"] if self.preprocess else []
        for member in self.members:
            parts += [member.name, repr(member.weight), repr(member.temperature)]
            parts += [member.network(precision).fingerprint]
            parts += [member.image.key if member.image else ""]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]

    def plan_problem(self, precision: Precision, argument: str | None = None) -> str | None:
        """Return why the set has no fast plan for its networks of a precision; None if it has.

        ``argument`` is the set's name for commands.
        """
        make = f"tandem evaluate {argument or self.name} --images DIR --plan makes one"
        if self.is_multi_label:
            return f"{self.name} is multi-label: a fast plan needs classes that exclude each other"
        if self.fast_plan is None:
            return f"{self.name} has no fast plan; {make}"
        made_with = self.fast_plan.precision
        if made_with != precision:
            return f"the fast plan of {self.name} is of {made_with}, not of {precision}; {make}"
        if self.fast_plan.made_for != self.plan_key(precision):
            return (
                f"the fast plan of {self.name} was made for other networks, weights or "
                f"temperatures; {make} for these"
            )
        return None

    def usable_plan(self, precision: Precision) -> PlanRecord | None:
        """Return the fast plan, if it was made for the set's networks of a precision."""
        return self.fast_plan if self.plan_problem(precision) is None else None

    @property
    def whole_average(self) -> AverageRecord:
        """What the average of all members is worth."""
        return AverageRecord(
            temperature=self.temperature, sure=self.sure, answer_set=self.answer_set
        )

    @property
    def trust_table(self) -> TrustTable:
        """What each average of the set's members is worth."""
        members, whole = tuple(self.weights), self.whole_average
        return TrustTable(self.name, members, whole, self.trust, self.fast_plan)

    @property
    def fingerprints(self) -> dict[Precision, str]:
        """Return the fingerprint of each precision that all members have, INT8 first."""
        members = self.members
        whole = [p for p in PRECISIONS if all(m.precision_of(p) in m.networks for m in members)]
        return {precision: self.fingerprint(precision) for precision in whole}

    def member(self, name: str) -> MemberRecord:
        """Return the member called ``name``; the error lists the existing names."""
        for record in self.members:
            if record.name == name:
                return record
        there = ", ".join(record.name for record in self.members)
        raise ModelSetError(f"model set {self.name} has no member {name!r}; it has: {there}")


def read_manifest(folder: Path) -> Manifest:
    """Read ``folder/manifest.yaml``; the error lists every mistake with its place."""
    path = folder / MANIFEST_NAME
    try:
        with reading(path):
            return Manifest.model_validate(read_yaml(path))
    except YamlError as error:
        raise ModelSetError(error.message) from error
    except ValidationError as error:
        places = [f"{'.'.join(map(str, e['loc'])) or 'top'}: {e['msg']}" for e in error.errors()]
        raise ModelSetError(f"{path}: " + "; ".join(places)) from error
