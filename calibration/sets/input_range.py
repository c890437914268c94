"""Determines the pixel values that a network takes, from its first layers or its metadata.

Many networks normalise pixels themselves: Keras' EfficientNet begins with a division by 255. The
layers that treat each channel by itself (casts, transposes, arithmetic, batch normalisation,
rounding) are run on images of one colour, which gives the line y = gain * x + offset of each
channel, whatever its operators are. A convention of inputs fits if it and that line together are
a normalisation that networks are trained with.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov

from calibration.sets.files import check_file
from calibration.sets.input import (
    ColorOrder,
    FirstConvolution,
    InputForm,
    Normalisation,
    as_text,
    first_convolution,
    formula,
    with_channel,
)
from calibration.sets.labels import notes_of
from calibration.sets.options import FileOptions, Sides, input_form
from models.errors import ModelSetError
from models.openvino_network import compile_with, read_network

Values = npt.NDArray[np.float64]
CONVENTIONS = {
    "0 to 255": Normalisation((0.0,) * 3, (1.0,) * 3),
    "0 to 1": Normalisation((0.0,) * 3, (255.0,) * 3),
    "-1 to 1": Normalisation((127.5,) * 3, (127.5,) * 3),
    "ImageNet's mean and scale": Normalisation(),
}
CAFFE = Normalisation((103.939, 116.779, 123.68), (1.0,) * 3, "BGR")
OF_INT8 = Normalisation((128.0,) * 3, (1.0,) * 3)
# Mean and scale of 0-255 pixels, RGB, behind a network's own first layers. Equal ones of all
# channels: 0..1, -1..1 and -0.5..0.5, by 255, 256, 127 or 128.
TRAINED_WITH = (
    *(Normalisation((mean,) * 3, (scale,) * 3) for mean in (0, 127.5) for scale in (1, 127.5, 255)),
    Normalisation(),
    CAFFE,
    Normalisation((123.68, 116.779, 103.939), (58.393, 57.12, 57.375)),
    Normalisation((122.771, 116.746, 104.094), (68.501, 66.632, 70.323)),  # CLIP
    Normalisation((125.307, 122.951, 113.865), (62.993, 62.089, 66.705)),  # CIFAR-10
)
MEAN_SLACK, SCALE_SLACK = 1.5, 0.02  # of a mean, 0 to 255, and, relative, of a scale
USUAL_MEAN, USUAL_SCALE = 118.0, 64.0  # of photographs
MEAN_STEP = 60.0  # how far a mean is as unlikely as half or twice the scale
LEAST_LEAD, MOST_OFF = 1.0, 5.0  # steps between the best convention and another, and of the best
# Of a first convolution that divides pixels by 255 itself; others spread by 60 and more.
LEAST_SPREAD, MOST_SPREAD = 0.2, 12.0
MOST_MOVED = 4.0  # of 255 levels, between pixels and what a quantised input takes
BOUND_SLACK = 0.1  # of the range of a convention
ORDERS: tuple[ColorOrder, ...] = ("RGB", "BGR")
MAX_LAYERS = 40
FAR = 1e4  # beyond any input; what is bounded or rounded does not follow a line up to it
MIXING = ("Convolution", "GroupConvolution", "MatMul")
ULTRALYTICS = "Ultralytics"  # its classifiers take 0..1 RGB


@dataclass(frozen=True)
class FirstLayers:
    """The line that each channel of the input passes, in the order of the input's channels.

    ``low`` and ``high`` are where it is bounded (a clip, or the range of a quantisation), in units
    of the input; infinite: nowhere.
    """

    gain: Values
    offset: Values
    low: float = -np.inf
    high: float = np.inf
    is_reversed: bool = False  # channels leave in the other order

    @property
    def is_plain(self) -> bool:
        """Whether pixels stay as they are."""
        return bool(np.allclose(self.gain, 1, atol=1e-3) and np.allclose(self.offset, 0, atol=1e-3))

    @property
    def formula(self) -> str:
        """The arithmetic as text, for people."""
        rows = (-self.offset / self.gain, 1 / self.gain)
        mean, scale = ([float(f"{value:.4g}") for value in row] for row in rows)
        return formula("x", mean, scale)


@dataclass(frozen=True)
class Wanted:
    """The input that a network wants; None: nothing tells."""

    convention: str | None = None
    color_order: ColorOrder | None = None
    why: str = ""
    among: tuple[str, ...] = ()  # conventions of which nothing tells the right one
    is_reversed: bool = False
    exact: Normalisation | None = None  # stated by its metadata, and of no convention

    def in_order(self, order: ColorOrder) -> Normalisation | None:
        """Return the normalisation that it wants of channels in this order; None: nothing tells."""
        if self.convention:
            return usual(self.convention, order)
        return self.exact and replace(self.exact, color_order=order)


@dataclass(frozen=True)
class Fitted:
    """The options by which a network is read, a remark on its range, and a possible problem."""

    options: FileOptions
    note: str
    doubt: str | None = None
    wanted: tuple[Normalisation, ...] = ()  # by the file alone; of both orders, if it tells none


def fitted_file(file: Path, path: Path, options: FileOptions) -> Fitted:
    """Return :func:`fitted` of a file that another runtime runs, if OpenVINO can read it."""
    check_file(file)
    try:
        model = read_network(file)
        form = input_form(sides_of(model.input()), "", options.input_size, options.layout)
    except (ModelSetError, RuntimeError, UnicodeDecodeError):
        return Fitted(options, "")
    return fitted(model, form, options, path)


def sides_of(port: ov.Output) -> Sides:
    """Return the sides of an input; none if their number is open."""
    shape = port.partial_shape
    if shape.rank.is_dynamic:
        return ()
    return tuple(side.get_length() if side.is_static else None for side in shape)


def fitted(model: ov.Model, form: InputForm, options: FileOptions, path: Path) -> Fitted:
    """Return the options, completed by what the network wants where none was stated.

    Raises :class:`ModelSetError` if it normalises pixels, or reverses their colours, in a way that
    leaves open what it takes; the message has the options to say it with.
    """
    kind = model.input().element_type
    stated, first = _stated_in(notes_of(model, path)), first_layers(model, form)
    wanted = _wanted(first, kind, options.normalisation) if first else Wanted()
    if not kind.is_integral():
        if stated is not None:
            wanted = _agreed(stated, wanted)
        elif first and first.is_plain and not wanted.convention:
            wanted = _in_convolution(first_convolution(model, form), wanted)
    order = _order(wanted, kind, options, path)
    options, doubt = replace(options, pixel_order=order), None
    if order and wanted.color_order and order != wanted.color_order:
        doubt = f"{wanted.why}, of {wanted.color_order}, and --color-order says {order}"
    orders = ORDERS if wanted.color_order is None else (wanted.color_order,)
    if kind.is_integral():
        own = tuple(usual("0 to 255", o) for o in orders) if wanted.color_order else ()
        return Fitted(options, "", doubt or _pixel_doubt(stated, first, kind), own)
    own = tuple(how for o in orders if (how := wanted.in_order(o)))
    how = replace(options.normalisation, color_order=order or options.normalisation.color_order)
    note = wanted.why if own else "assumed: its first layers normalise nothing"
    right = wanted.in_order(how.color_order)
    if not options.is_stated:
        _check_clear(wanted, path)
        return Fitted(replace(options, normalisation=right or how), f" ({note})", doubt, own)
    if right is not None and not right.is_close(how):
        doubt = (
            f"{wanted.why}, which is of {_pixels_of(wanted)} ({right.flags}). With the mean "
            "and scale that were stated they are normalised twice, or not at all: --try PHOTO "
            "shows the answers of each"
        )
    return Fitted(replace(options, normalisation=how), " (as stated)", doubt, own)


def usual(convention: str, order: ColorOrder) -> Normalisation:
    """Return the normalisation of a convention, its channels in this order."""
    how, step = CONVENTIONS[convention], 1 if order == "RGB" else -1
    (r, g, b), (x, y, z) = how.mean[::step], how.scale[::step]
    return Normalisation((r, g, b), (x, y, z), order)


def _pixels_of(wanted: Wanted) -> str:
    return f"pixels from {wanted.convention}" if wanted.convention else "pixels from 0 to 255"


def _agreed(stated: Wanted, layers: Wanted) -> Wanted:
    """Return what metadata states; both, if the first layers want other pixels."""
    if layers.convention in (None, stated.convention) or stated.convention is None:
        return stated
    why = f"{stated.why}, and {layers.why}"
    return Wanted(None, stated.color_order, why, (stated.convention, layers.convention))


def _pixel_doubt(stated: Wanted | None, first: FirstLayers | None, kind: ov.Type) -> str | None:
    """Return a warning if an integer input of what metadata states is not the pixels themselves."""
    if stated is None or first is None or kind not in (ov.Type.u8, ov.Type.i8):
        return None
    if (how := stated.in_order("RGB")) is None:
        return None
    zero = 128 if kind == ov.Type.i8 else 0
    mean, scale = _in_order(how.mean, how, "RGB"), _in_order(how.scale, how, "RGB")
    taken = ((np.array([0.0, 255.0])[:, None] - mean) / scale - first.offset) / first.gain + zero
    if np.abs(taken - [[0.0], [255.0]]).max() <= MOST_MOVED:
        return None
    low, high = (as_text([round(float(v)) for v in row]) for row in taken)
    return (
        f"{stated.why}, which its quantisation makes {low} to {high} of pixels from 0 to 255, and "
        "Tandem gives it these pixels as they are: --try PHOTO shows the answers"
    )


def _order(wanted: Wanted, kind: ov.Type, options: FileOptions, path: Path) -> ColorOrder | None:
    order = options.pixel_order or wanted.color_order
    if wanted.is_reversed and order is None and kind != ov.Type.u8:
        raise ModelSetError(
            f"{path} reverses the colours itself, and nothing tells which order it takes: say "
            "--color-order RGB or --color-order BGR (--try PHOTO shows the answers of both)"
        )
    return order


def _check_clear(wanted: Wanted, path: Path) -> None:
    if wanted.among:
        ways = "; ".join(f"{CONVENTIONS[name].flags} ({name})" for name in wanted.among)
        raise ModelSetError(
            f"{path}: {wanted.why}, and it is unclear of which pixels. Say one of: {ways}. --try "
            "PHOTO shows the answers of each"
        )


def first_layers(model: ov.Model, form: InputForm) -> FirstLayers | None:
    """Return what a network's first layers compute; None if they cannot be run by themselves."""
    trial, form = model.clone(), replace(form, batch=form.batch or 1)
    if form.layout == "NHW":
        trial, form = with_channel(trial), replace(form, layout="NHWC")
    shape, num_channels = form.shape, form.channels
    try:
        trial.reshape(shape)
        axes = [(end, _channel_axis(end, num_channels)) for end in _ends(trial)]
        ends = [(end, axis) for end, axis in axes if axis is not None]
        if not ends:
            return None
        cut = ov.Model([end for end, _ in ends], trial.get_parameters(), "first")
        compiled = compile_with(cut, {"INFERENCE_PRECISION_HINT": "f32"})
    except RuntimeError:
        return None
    kind = trial.input().element_type.to_dtype()
    place = (1, -1, 1, 1) if form.layout == "NCHW" else (1, 1, 1, -1)

    def run(color: Values) -> list[Values]:
        images = np.broadcast_to(color.astype(kind).reshape(place), shape)
        rows = compiled(np.ascontiguousarray(images))
        return [_center(rows[n], axis) for n, (_, axis) in enumerate(ends)]

    lines = list[FirstLayers]()
    for values in _by_end(run, num_channels, is_bounded=np.issubdtype(kind, np.floating)):
        if (line := _line(*values)) is None:
            break
        lines.append(line)
    return lines[-1] if lines else None


def _ends(model: ov.Model) -> Iterator[ov.Output]:
    """Yield the outputs of the layers that all ways from the image pass, up to the first mixing."""
    parameter = model.get_parameters()[0]
    waiting, count = {parameter.get_name()}, 0
    for node in model.get_ordered_ops():
        if node.get_name() not in waiting:
            continue
        is_passed_by_all = len(waiting) == 1
        waiting.remove(node.get_name())
        if is_passed_by_all:
            if node.get_type_name() == "Result" or count > MAX_LAYERS or _is_mixing(node):
                return
            count += 1
            if node.get_output_size() == 1:
                yield node.output(0)
        for output in node.outputs():
            targets = (port.get_node() for port in output.get_target_inputs())
            waiting.update(t.get_name() for t in targets if t.get_type_name() != "ShapeOf")


def _is_mixing(node: ov.Node) -> bool:
    """Whether it is a layer with weights that makes a pixel's channels of more than these."""
    if (kind := node.get_type_name()) not in MIXING:
        return False
    kernel = [] if kind == "MatMul" else list(node.input(1).get_partial_shape())[-2:]
    return 3 not in _static(node.output(0)) or any(side != 1 for side in kernel)


def _static(port: ov.Output) -> list[int]:
    shape = port.get_partial_shape()
    return list(shape.to_shape()) if shape.is_static else []


def _channel_axis(port: ov.Output, number: int) -> int | None:
    sides = _static(port)
    if number == 1 and len(sides) > 2:  # grey: any value is of the only channel
        return 0
    axes = [axis for axis, side in enumerate(sides) if axis and side == number]
    return axes[0] if len(axes) == 1 and len(sides) > 2 else None


def _center(values: npt.NDArray[Any], axis: int) -> Values:
    place: list[Any] = [0 if n == 0 else side // 2 for n, side in enumerate(values.shape)]
    place[axis] = slice(None) if axis else slice(1)
    center: Values = values[tuple(place)].astype(np.float64)
    return center


def _by_end(run: Any, number: int, *, is_bounded: bool) -> Iterator[Any]:
    """Yield, for each end: its values of black, of each channel's 1, of 1, 100, and far ones."""
    grey = np.ones(number)
    colors = [0 * grey, *np.eye(number), grey, 100 * grey]
    colors += [FAR * grey, -FAR * grey] if is_bounded else []
    by_color = [run(color) for color in colors]
    for of_end in zip(*by_color, strict=True):
        black, ones, (white, bright, *far) = of_end[0], of_end[1 : number + 1], of_end[number + 1 :]
        yield black, np.stack(ones), white, bright, far


def _line(
    black: Values, ones: Values, white: Values, bright: Values, far: Sequence[Values]
) -> FirstLayers | None:
    """Return the line of values by colour; None if channels mix, or it is no line."""
    if not all(np.isfinite(values).all() for values in (black, ones, white, bright, *far)):
        return None
    gains = ones - black  # (channels in, channels out)
    size = np.abs(gains).max()
    large = np.abs(gains) > 0.02 * size
    if not size > 0 or not (large.sum(0) == 1).all() or not (large.sum(1) == 1).all():
        return None
    to = large.argmax(1)
    if to.tolist() not in ([*range(len(to))], [*range(len(to))][::-1]):
        return None
    gain, offset = gains[np.arange(len(to)), to], black[to]
    slack = 0.02 * np.abs(gain) + 1e-6
    if (np.abs(white[to] - offset - gain) > slack).any():
        return None
    bounds = [float(((values[to] - offset) / gain).mean()) for values in far]
    high, low = bounds or (np.inf, -np.inf)
    is_line = np.abs(bright[to] - offset - 100 * gain) <= 100 * slack
    if not (is_line | (high < 100)).all():
        return None
    return FirstLayers(gain, offset, low, high, len(to) > 1 and to[0] != 0)


def _wanted(first: FirstLayers, kind: ov.Type, assumed: Normalisation) -> Wanted:
    """Return the convention that makes a usual normalisation of what the first layers compute."""
    if kind.is_integral():
        whole = OF_INT8 if kind == ov.Type.i8 else CONVENTIONS["0 to 255"]
        conventions = {"0 to 255": whole}
    else:
        is_grey = len(first.gain) == 1
        conventions = {
            name: how for name, how in CONVENTIONS.items() if not is_grey or len({*how.mean}) == 1
        }
    right = [
        (name, order)
        for name, how in conventions.items()
        for order in ORDERS
        if any(_is_usual(_together(first, how, order), known, order) for known in TRAINED_WITH)
    ]
    names, orders = {name for name, _ in right}, {order for _, order in right}
    if len(orders) != 1:  # the means alone, whatever the scale
        black = CONVENTIONS["0 to 255"]
        of_pixels = _together(first, black, "RGB")[0]
        orders = {o for o in ORDERS for known in TRAINED_WITH if _has_means(of_pixels, known, o)}
    order = orders.pop() if len(orders) == 1 else None
    why = f"its first layers compute {first.formula}"
    if kind.is_integral():
        return Wanted(None, order, why, is_reversed=first.is_reversed)
    if len(names) == 1:
        return Wanted(names.pop(), order, why, is_reversed=first.is_reversed)
    if bounded := _of_bounds(first):
        why = f"its first layers take values from {first.low:.1f} to {first.high:.1f}"
        return Wanted(bounded, order, why, is_reversed=first.is_reversed)
    if first.is_plain:
        return Wanted(is_reversed=first.is_reversed)
    off = {name: _off(_together(first, how, "RGB")) for name, how in conventions.items()}
    best, *others = sorted(off, key=off.__getitem__)
    near = [name for name in others if off[name] < off[best] + LEAST_LEAD]
    if off[best] > MOST_OFF or any(
        conventions[name].is_close(replace(assumed, color_order="RGB")) for name in (best, *near)
    ):
        return Wanted(None, order, why, is_reversed=first.is_reversed)
    if near:
        return Wanted(None, order, why, (best, *near), first.is_reversed)
    return Wanted(best, order, why, is_reversed=first.is_reversed)


def _in_convolution(first: FirstConvolution | None, wanted: Wanted) -> Wanted:
    """Return what a first convolution wants that holds the normalisation; else ``wanted``."""
    if first is None:
        return wanted
    if first.mean is not None:
        right = [
            (name, order)
            for name, how in CONVENTIONS.items()
            for order in ORDERS
            for known in TRAINED_WITH
            if any(known.mean) and len(first.mean) in (3, len({*known.mean}))
            if _has_means(_as_pixels(first.mean, how, order), known, order)
        ]
        names, orders = {name for name, _ in right}, {order for _, order in right}
        if len(names) == 1:
            mean = as_text([float(f"{value:.4g}") for value in first.mean])
            why = f"the bias of its first convolution holds the mean {mean}"
            return Wanted(names.pop(), orders.pop() if len(orders) == 1 else None, why)
    if LEAST_SPREAD < first.spread < MOST_SPREAD:
        why = "the weights of its first convolution are as small as if they divided by 255"
        return replace(wanted, why=why, among=("0 to 255", "0 to 1"))
    return wanted


def _as_pixels(mean: Values, how: Normalisation, order: ColorOrder) -> Values:
    """Return pixels of which a convention makes these numbers."""
    own, scale = (_in_order(values, how, order)[: len(mean)] for values in (how.mean, how.scale))
    return own + mean * scale


def _together(first: FirstLayers, how: Normalisation, order: ColorOrder) -> tuple[Values, Values]:
    """Return mean and scale of pixels that pass both, in the order of the input's channels."""
    mean, scale = (
        _in_order(values, how, order)[: len(first.gain)] for values in (how.mean, how.scale)
    )
    return mean - first.offset / first.gain * scale, scale / first.gain


def _is_usual(together: tuple[Values, Values], known: Normalisation, order: ColorOrder) -> bool:
    scale = _in_order(known.scale, known, order)[: len(together[1])]
    is_scale = np.abs(together[1] / scale - 1).max() <= SCALE_SLACK
    return bool(is_scale and _has_means(together[0], known, order))


def _has_means(mean: Values, known: Normalisation, order: ColorOrder) -> bool:
    own = _in_order(known.mean, known, order)[: len(mean)]
    return bool(np.abs(mean - own).max() <= MEAN_SLACK)


def _in_order(values: Sequence[float], how: Normalisation, order: ColorOrder) -> Values:
    return np.array(values[:: 1 if order == how.color_order else -1])


def _off(together: tuple[Values, Values]) -> float:
    """Return how unlike a normalisation of photographs this is, in steps."""
    mean, scale = together[0].mean(), float(np.abs(together[1]).mean())
    return float(abs(mean - USUAL_MEAN) / MEAN_STEP + abs(np.log2(scale / USUAL_SCALE)))


def _of_bounds(first: FirstLayers) -> str | None:
    """Return the convention whose values just fit in the bounds of the input."""
    if not np.isfinite(first.high - first.low):
        return None
    ends = np.array([first.low, first.high])
    near = {
        name: float(np.abs(ends - own).max() / (own[1] - own[0]))
        for name, how in CONVENTIONS.items()
        if (
            own := np.array(
                [min(-np.divide(how.mean, how.scale)), max(np.subtract(255, how.mean) / how.scale)]
            )
        ).any()
    }
    best = min(near, key=near.__getitem__)
    return best if near[best] < BOUND_SLACK else None


def _stated_in(notes: Mapping[str, str]) -> Wanted | None:
    """Return what the file's metadata says of its input; None: nothing."""
    if notes.get("author") == ULTRALYTICS:
        return Wanted("0 to 1", "RGB", "it is Ultralytics' classifier")
    if not {"mean_values", "scale_values"} & {*notes} or notes.get("embedded_processing") == "True":
        return None
    try:
        mean, scale = (
            np.broadcast_to([float(text) for text in notes.get(key, default).split()], 3).tolist()
            for key, default in (("mean_values", "0"), ("scale_values", "1"))
        )
    except ValueError:
        return None
    if not np.isfinite([*mean, *scale]).all() or not all(scale):
        return None
    order: ColorOrder | None = None
    if notes.get("reverse_input_channels", "") in ("True", "YES", "1"):
        order = "RGB"
    why = f"its metadata has mean {as_text(mean)}, scale {as_text(scale)}"
    for name, how in CONVENTIONS.items():
        if np.allclose(mean, how.mean, atol=1) and np.allclose(scale, how.scale, rtol=0.01):
            return Wanted(name, order, why)
    (r, g, b), (x, y, z) = mean, scale
    return Wanted(None, order, why, exact=Normalisation((r, g, b), (x, y, z)))
