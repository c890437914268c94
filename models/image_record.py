"""The image section of a manifest, or of a member: input size, resize and colour order."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from models.image import ImageRule, Resize
from models.image_resize import Interpolation
from models.record import Record

LATER_FIELDS = {"resize", "interpolation"}  # absent in the first manifests


class ImageRecord(Record):
    """How bytes become the networks' input; see :class:`models.image.ImageRule`."""

    input_size: Annotated[int, Field(ge=1, le=4096)]
    resize_shorter: Annotated[int, Field(ge=1, le=8192)]
    color_order: Literal["BGR"] = "BGR"  # OpenCV's; the IR turns it into the network's own
    resize: Resize = "crop"
    interpolation: Interpolation = "bilinear"

    @model_validator(mode="after")
    def _crop_fits(self) -> "ImageRecord":
        _ = self.rule  # which checks it
        return self

    @property
    def rule(self) -> ImageRule:
        return ImageRule(self.input_size, self.resize_shorter, self.resize, self.interpolation)

    @property
    def key(self) -> str:
        """A text that differs between records, without later fields at their defaults."""
        values = self.model_dump(exclude_defaults=True)
        return self.model_dump_json(exclude=LATER_FIELDS - values.keys())
