"""The options of a member's input, output and classes, and how a network's file is read by them.

Members may differ from the others of their set. The file of ``tandem models add --member-options``
has the options of each::

    v1: {resize: stretch, interpolation: bicubic}
    vit: {input_size: 224, resize_shorter: 248, color_order: RGB, layout: NCHW,
          mean: [127.5, 127.5, 127.5], scale: [127.5, 127.5, 127.5], outputs: logits}

Class lists of the same problem differ in order, and by a class for "none of them" ("background").
Mapping by position would confuse them silently, so they are mapped by id, in the network itself.
Classes of a network that the set lacks are left out before softmax: the others share their
probability in proportion. The scores of a multi-label network are independent and stay as they are.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import openvino as ov
from openvino import opset13 as ops
from pydantic import Field, TypeAdapter, ValidationError, model_validator

from calibration.sets.ending import Outputs
from calibration.sets.input import ColorOrder, InputForm, Normalisation, TensorLayout
from models.errors import ModelSetError, reading
from models.image import SCALED, Resize, Size, sides_of, size_of, size_text
from models.image_geometry import Interpolation
from models.openvino_network import named_output
from models.record import ImageRecord, InputSize, Record, Task, YamlError, read_yaml

Finite = Annotated[float, Field(allow_inf_nan=False)]
Channels = tuple[Finite, Finite, Finite]
YOLO_GREY = 114  # of its borders
CROPPED = 8 / 7  # the shorter side before the crop, relative to the input size: 256 / 224
Sides = tuple[int | None, ...]  # of a tensor; None: left open
LEAST_SUM = np.float32(1e-12)
NUM_NAMED = 5


class MemberOptions(Record):
    """The options of one member; None means the set's option."""

    input_size: InputSize | None = None  # px, where the network leaves it open
    resize: Resize | None = None
    resize_shorter: Annotated[int, Field(ge=1)] | None = None
    interpolation: Interpolation | None = None
    fill: Annotated[int, Field(ge=0, le=255)] | None = None  # of borders
    layout: TensorLayout | None = None
    color_order: ColorOrder | None = None
    mean: Channels | None = None  # on 0-255 pixels, in color_order
    scale: Channels | None = None
    outputs: Outputs | None = None

    @model_validator(mode="after")
    def _scale_divides(self) -> "MemberOptions":
        if self.scale is not None and 0 in self.scale:
            raise ValueError(f"scale has a zero: {self.scale}")
        return self

    def over(self, base: "MemberOptions") -> "MemberOptions":
        """Return these options, completed by those of ``base``."""
        return base.model_copy(update=self.model_dump(exclude_none=True))

    @property
    def normalisation(self) -> Normalisation:
        """The normalisation of a network with float input."""
        usual = Normalisation()
        return Normalisation(
            self.mean or usual.mean, self.scale or usual.scale, self.color_order or "RGB"
        )

    def image(self, size: Size) -> ImageRecord:
        """Return the image record of a member that takes ``size`` pixels."""
        long, resize = max(sides_of(size)), self.resize or "crop"
        shorter = self.resize_shorter or round(long * CROPPED) if resize in SCALED else long
        usual = YOLO_GREY if resize == "letterbox" else 0
        return ImageRecord(
            input_size=size,
            resize_shorter=shorter,
            resize=resize,
            interpolation=self.interpolation or "bilinear",
            fill=usual if self.fill is None else self.fill,
        )


def read_member_options(path: Path) -> dict[str, MemberOptions]:
    """Read a YAML file of options by member.

    Raises :class:`ModelSetError` if it cannot be read, or has an unknown option.
    """
    try:
        with reading(path):
            return TypeAdapter(dict[str, MemberOptions]).validate_python(read_yaml(path))
    except YamlError as error:
        raise ModelSetError(error.message) from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "top"
        known = ", ".join(MemberOptions.model_fields)
        raise ModelSetError(f"{path}: {where}: {first['msg']}; a member has {known}") from error


@dataclass(frozen=True)
class ClassMap:
    """The ids of a network's classes and of the set's, each in its own order."""

    own: tuple[str, ...]
    wanted: tuple[str, ...]
    where: str  # the file of the network's own

    def __post_init__(self) -> None:
        if doubled := [name for name, count in Counter(self.own).items() if count > 1]:
            raise ModelSetError(f"{self.where} has class ids twice: {_some(doubled)}")
        if missing := [name for name in self.wanted if name not in set(self.own)]:
            raise ModelSetError(
                f"{self.where} lacks {len(missing)} of the set's {len(self.wanted)} classes: "
                f"{_some(missing)}. Each member must know every class of the set: leave them out "
                "of --labels and --class-ids, or the member"
            )

    def check_fits(self, num_classes: int, path: Path) -> None:
        """Raise :class:`ModelSetError` unless the network in ``path`` has a class per id."""
        if num_classes != len(self.own):
            raise ModelSetError(
                f"{path} has {num_classes} classes, {self.where} {len(self.own)} ids: they are "
                "not of the same network"
            )

    @property
    def positions(self) -> list[int]:
        """The position of each of the set's classes among the network's."""
        places = {name: place for place, name in enumerate(self.own)}
        return [places[name] for name in self.wanted]


@dataclass(frozen=True)
class FileOptions:
    """How to read a file."""

    input_size: Size | None = None  # px, where the network leaves it open
    # Of a network that takes floats. One that takes integers takes pixels as they are, int8 less
    # 128.
    normalisation: Normalisation = field(default_factory=Normalisation)
    outputs: Outputs = "auto"  # auto: by the graph, or by rows of images if that is unclear
    layout: TensorLayout | None = None  # None: the dimension that has three sides is the colours'
    # Of a network that takes pixels. None: BGR for IR and ONNX that take uint8, which are taken as
    # folded already, RGB for all else.
    pixel_order: ColorOrder | None = None
    classes: ClassMap | None = None  # the network's own, if they are to be mapped to others
    task: Task | None = None  # None: multi-label if it ends in a sigmoid, else classification
    is_stated: bool = (
        True  # mean or scale was stated: what the network wants is no reason to change
    )


def check_ends(path: Path, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Raise :class:`ModelSetError` unless a network has one input and one output."""
    for what, names in (("inputs", inputs), ("outputs", outputs)):
        if len(names) != 1:
            raise ModelSetError(
                f"{path} has {len(names)} {what} ({', '.join(names)}); a member has one image in "
                "and one row of classes out: export it again with that one alone"
            )


def input_form(
    sides: Sides, facts: str, input_size: Size | None, layout: TensorLayout | None
) -> InputForm:
    """Return the form of an input that has these sides.

    Without a ``layout`` the dimension that has three sides is the colours', else the one that has
    one side is the grey channel's. Raises :class:`ModelSetError`, whose message begins with
    ``facts``, if it is not an image, or its size is open.
    """
    if len(sides) == 3 and 3 not in sides and layout in (None, "NHW"):
        form = input_form((*sides, 1), facts, input_size, "NHWC")
        return replace(form, layout="NHW")
    if len(sides) != 4 or layout == "NHW":
        raise ModelSetError(
            f"{facts}; a member takes images, [N,3,H,W] or [N,H,W,3], or grey ones, with 1 in "
            "place of 3 or as [N,H,W]"
        )
    ends = sides[1], sides[3]
    if layout is None and not {1, 3} & {*ends}:
        raise ModelSetError(
            f"{facts}; no side is 3 or 1 channels: a member takes colour or grey images"
        )
    layout = layout or ("NCHW" if sides[1] == (3 if 3 in ends else 1) else "NHWC")
    channels = sides[1] if layout == "NCHW" else sides[3]
    if channels not in (1, 3, None):
        raise ModelSetError(
            f"{facts}; as {layout} that is {channels} channels, a member takes 3, or 1 for grey"
        )
    own = sides[2:] if layout == "NCHW" else sides[1:3]
    asked = (None, None) if input_size is None else sides_of(input_size)
    height, width = (side or other for side, other in zip(own, asked, strict=True))
    if height is None or width is None:
        raise ModelSetError(
            f"{facts}: its size is open, so say --input-size (224 for ImageNet; HEIGHTxWIDTH for a "
            "rectangle)"
        )
    size = size_of(height, width)
    if input_size not in (None, size):
        raise ModelSetError(
            f"{facts}; it takes {size_text(size)} px, --input-size says {size_text(input_size)}"
        )
    return InputForm(size, layout, sides[0], channels or 3)


def num_classes_of(sides: Sides, facts: str) -> int:
    """Return C of an output (N, C), (N, C, 1, 1) or (N, 1, 1, C); 1 of (N).

    Raises :class:`ModelSetError` if it is not a row of classes; ``facts`` begins the message.
    """
    wide = [side for side in sides[1:] if side != 1]
    if not sides or len(wide) > 1 or None in wide:
        raise ModelSetError(
            f"{facts}; a member gives probabilities [?,C], one row an image: networks for "
            "detection, segmentation or features are no classifiers"
        )
    return int(wide[0] or 1) if wide else 1


def select_classes(
    model: ov.Model, classes: ClassMap, path: Path, task: Task = "classification"
) -> ov.Model:
    """Return the network with rows of the set's classes, in the set's order.

    Scores of a multi-label network stay as they are. Raises :class:`ModelSetError` if the numbers
    of the network's classes and ids differ.
    """
    (num_classes,) = list(model.output().partial_shape)[1:]
    classes.check_fits(num_classes, path)
    if classes.own == classes.wanted:
        return model
    end = model.output().get_node().input_value(0)
    last = end.get_node()
    if task == "multi_label":
        picked = _picked(end, classes)
    elif last.get_type_name() == "Softmax" and len(last.input_value(0).get_partial_shape()) == 2:
        picked = ops.softmax(_picked(last.input_value(0), classes), axis=1)
    else:
        rows = _picked(end, classes)
        sums = ops.reduce_sum(rows, np.array([1]), keep_dims=True)
        picked = ops.divide(rows, ops.maximum(sums, LEAST_SUM))
    return named_output(model, picked, "probabilities")


def _picked(rows: ov.Output, classes: ClassMap) -> ov.Node:
    return ops.gather(rows, np.array(classes.positions, np.int32), np.int32(1))


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else ""
    return ", ".join(names[:NUM_NAMED]) + more
