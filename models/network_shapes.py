"""What a member's network takes and gives, read off its graph."""

import openvino as ov

from models.errors import ModelSetError


def fixed_batch(model: ov.Model) -> int | None:
    """Return the number of images that a network was exported for; None: any."""
    number = model.input().partial_shape[0]
    return None if number.is_dynamic else int(number.get_length())


def check_network(model: ov.Model, where: str) -> tuple[tuple[int, ...], int]:
    """Return ((H, W, 3), C) of an IR that takes uint8 NHWC and gives (N, C), or raise why not."""
    if len(model.inputs) != 1 or len(model.outputs) != 1:
        raise ModelSetError(
            f"{where} has {len(model.inputs)} inputs and {len(model.outputs)} outputs; "
            "a member has one of each"
        )
    shape, kind = model.input().partial_shape, model.input().element_type
    height_width = [d.get_length() if d.is_static else -1 for d in shape][1:]
    if kind != ov.Type.u8 or len(height_width) != 3 or height_width[2] != 3 or -1 in height_width:
        raise ModelSetError(
            f"{where} takes {kind} {shape}; a member takes u8 [?,H,W,3] with H and W fixed: "
            "fold the preprocessing in (calibration.sets.convert does)"
        )
    out = model.output().partial_shape
    if len(out) != 2 or not out[1].is_static:
        raise ModelSetError(f"{where} gives {out}; a member gives probabilities [?,C]")
    return tuple(height_width), out[1].get_length()
