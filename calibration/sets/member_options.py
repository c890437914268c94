"""Options of a member's input and output that differ from the others of its set.

Of the file that ``tandem models add --member-options`` reads::

    v1: {resize: stretch, interpolation: bicubic}
    vit: {input_size: 224, resize_shorter: 248, color_order: RGB, layout: NCHW,
          mean: [127.5, 127.5, 127.5], scale: [127.5, 127.5, 127.5], outputs: logits}
"""

from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from calibration.sets.batch import TensorLayout
from calibration.sets.fold import ColorOrder, Normalisation
from calibration.sets.task import Outputs
from models.errors import ModelSetError
from models.image import Resize
from models.image_record import ImageRecord
from models.image_resize import Interpolation
from models.record import Record
from models.strict_yaml import YamlError, read_yaml

Finite = Annotated[float, Field(allow_inf_nan=False)]
Channels = tuple[Finite, Finite, Finite]
CROPPED = 8 / 7  # the shorter side before the crop, relative to the input size: 256 / 224


class MemberOptions(Record):
    """The options of one member; None means the set's option."""

    input_size: Annotated[int, Field(ge=1)] | None = None  # px, where the network leaves it open
    resize: Resize | None = None
    resize_shorter: Annotated[int, Field(ge=1)] | None = None
    interpolation: Interpolation | None = None
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

    def image(self, size: int) -> ImageRecord:
        """Return the image record of a member that takes ``size`` pixels."""
        is_stretched = self.resize == "stretch"
        shorter = size if is_stretched else self.resize_shorter or round(size * CROPPED)
        return ImageRecord(
            input_size=size,
            resize_shorter=shorter,
            resize=self.resize or "crop",
            interpolation=self.interpolation or "bilinear",
        )


def read_member_options(path: Path) -> dict[str, MemberOptions]:
    """Read a YAML file of options by member.

    Raises:
        ModelSetError: it cannot be read, or has an unknown option.

    """
    try:
        return TypeAdapter(dict[str, MemberOptions]).validate_python(read_yaml(path))
    except OSError as error:
        raise ModelSetError(f"cannot read {path}: {error.strerror}") from error
    except YamlError as error:
        raise ModelSetError(error.message) from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "top"
        known = ", ".join(MemberOptions.model_fields)
        raise ModelSetError(f"{path}: {where}: {first['msg']}; a member has {known}") from error
