"""How a network's file is read, and what its input and output must be, for every kind of file."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from calibration.sets.batch import TensorLayout
from calibration.sets.classes import ClassMap
from calibration.sets.fold import ColorOrder, Normalisation
from calibration.sets.task import Outputs
from models.errors import ModelSetError
from models.record import Task

Sides = tuple[int | None, ...]  # of a tensor; None: left open


@dataclass(frozen=True)
class FileOptions:
    """How to read a file."""

    input_size: int | None = None  # px, where the network leaves it open
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


def check_ends(path: Path, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Raise :class:`ModelSetError` unless a network has one input and one output."""
    for what, names in (("inputs", inputs), ("outputs", outputs)):
        if len(names) != 1:
            raise ModelSetError(
                f"{path} has {len(names)} {what} ({', '.join(names)}); a member has one image in "
                "and one row of classes out: export it again with that one alone"
            )


def layout_and_size(
    sides: Sides, facts: str, input_size: int | None, layout: TensorLayout | None
) -> tuple[TensorLayout, int, int | None]:
    """Return the layout, the side in pixels and the built-in batch of an input's four sides.

    Args:
        sides: of the input.
        facts: the beginning of an error's message.
        input_size: as asked for; None: the input's own.
        layout: as asked for; None: the dimension that has three sides is the colours'.

    Raises:
        ModelSetError: it is not a square colour image.

    """
    if len(sides) != 4:
        raise ModelSetError(f"{facts}; a member takes images, [N,3,H,W] or [N,H,W,3]")
    if layout is None and 3 not in (sides[1], sides[3]):
        raise ModelSetError(f"{facts}; no side is 3 channels: a member takes colour images")
    layout = layout or ("NCHW" if sides[1] == 3 else "NHWC")
    channels = sides[1] if layout == "NCHW" else sides[3]
    height, width = sides[2:] if layout == "NCHW" else sides[1:3]
    if channels not in (3, None):
        raise ModelSetError(f"{facts}; as {layout} that is {channels} channels, a member takes 3")
    if height != width:
        raise ModelSetError(f"{facts}; a member takes squares")
    size = height or input_size
    if size is None:
        raise ModelSetError(f"{facts}: its size is open, so say --input-size (224 for ImageNet)")
    if input_size not in (None, size):
        raise ModelSetError(f"{facts}; it takes {size} px, --input-size says {input_size}")
    return layout, size, sides[0]


def num_classes_of(sides: Sides, facts: str) -> int:
    """Return C of an output (N, C), (N, C, 1, 1) or (N, 1, 1, C).

    Raises:
        ModelSetError: it is not a row of classes; ``facts`` begins the message.

    """
    wide = [side for side in sides[1:] if side != 1]
    if len(sides) < 2 or len(wide) > 1 or None in wide:
        raise ModelSetError(
            f"{facts}; a member gives probabilities [?,C], one row an image: networks for "
            "detection, segmentation or features are no classifiers"
        )
    return int(wide[0] or 1) if wide else 1
