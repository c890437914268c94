"""The image section of a manifest: input size, resize and colour order."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from models.image import ImageRule
from models.record import Record


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
