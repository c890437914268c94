"""Measures a network's first convolution, which may hold the normalisation of pixels.

A converter may multiply 1/255 into its weights, and put a mean into its bias. With a batch
normalisation folded in, the outputs of trained convolutions spread by about one on photographs:
the largest tenth of channels by 1 to 9 in ResNet50, DenseNet169, MobileNet and EfficientNet-Lite.
A bias that is the sum of weights times one number a channel is a mean that was put there.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import openvino as ov

from calibration.sets.input import InputForm, with_channel
from models.openvino_network import compile_with

Values = npt.NDArray[np.float64]
BY_CHANNEL = ("Add", "Subtract", "Multiply", "Divide", "BatchNormInference")
MOST_LAYERS = 4  # of those behind the convolution
EXACT = 1e-3  # what a mean may leave of a bias, relatively
LEAST_BIAS = 1e-4
TEXTURE_MEAN, TEXTURE_SPREAD = 118.0, 64.0  # of photographs


@dataclass(frozen=True)
class FirstConvolution:
    """The measures of a first convolution, whose input is taken for pixels from 0 to 255.

    ``spread`` is the standard deviation of the outputs that spread most, on a texture; ``mean`` the
    input of which its outputs are 0, by channel, if it has no other bias.
    """

    spread: float
    mean: Values | None


def first_convolution(model: ov.Model, form: InputForm) -> FirstConvolution | None:
    """Return the measures; None if no convolution takes the image, or it cannot be run alone."""
    trial, form = model.clone(), replace(form, batch=form.batch or 1)
    if form.layout == "NHW":
        trial, form = with_channel(trial), replace(form, layout="NHWC")
    try:
        trial.reshape(form.shape)
        layers = trial.get_ordered_ops()
        first = next((n for n in layers if n.get_type_name() == "Convolution"), None)
        if first is None or _makes_patches(first):
            return None
        biased, end = _behind(first)
        cut = ov.Model([biased, end], trial.get_parameters(), "first")
        compiled = compile_with(cut, {"INFERENCE_PRECISION_HINT": "f32"})
    except RuntimeError:
        return None
    place = (1, -1, 1, 1) if form.layout == "NCHW" else (1, 1, 1, -1)

    def run(images: Values) -> list[Values]:
        rows = compiled(np.ascontiguousarray(np.broadcast_to(images, form.shape), np.float32))
        return [np.asarray(rows[n][0], np.float64) for n in (0, 1)]  # (C, H, W)

    def center(color: Values) -> Values:
        biased = run(color.reshape(place))[0]
        return biased[:, biased.shape[1] // 2, biased.shape[2] // 2]

    black, *ones = map(center, [np.zeros(form.channels), *np.eye(form.channels)])
    outputs = run(_texture(form))[1]
    spread = float(np.quantile(outputs.std(axis=(1, 2)), 0.9))
    return FirstConvolution(spread, _mean_in(black, np.stack(ones) - black))


def _makes_patches(layer: ov.Node) -> bool:
    """Whether windows do not overlap, as in a vision transformer: nothing normalises these."""
    kernel = list(layer.input(1).get_partial_shape())[2:]
    strides = layer.get_attributes()["strides"]
    return all(side == step > 1 for side, step in zip(kernel, strides, strict=True))


def _behind(layer: ov.Node) -> tuple[ov.Output, ov.Output]:
    """Return the output with the convolution's bias, and that behind its batch normalisation."""
    ends = [layer.output(0)]
    while len(ends) <= MOST_LAYERS:
        targets = [port.get_node() for port in ends[-1].get_target_inputs()]
        nodes = [node for node in targets if node.get_type_name() != "ShapeOf"]
        if len(nodes) != 1 or (node := nodes[0]).get_type_name() not in BY_CHANNEL:
            break
        others = [source for source in node.input_values() if source != ends[-1]]
        if not all(_is_constant(source.get_node()) for source in others):
            break
        ends.append(node.output(0))
    is_biased = len(ends) > 1 and ends[1].get_node().get_type_name() == "Add"
    return ends[1 if is_biased else 0], ends[-1]


def _is_constant(node: ov.Node) -> bool:
    """Whether an output of static shapes is the same for every image."""
    if (kind := node.get_type_name()) in ("Constant", "ShapeOf"):
        return True
    inner = (source.get_node() for source in node.input_values())
    return kind != "Parameter" and all(map(_is_constant, inner))


def _texture(form: InputForm) -> Values:
    """Return an image whose spectrum falls with frequency, as photographs' do, in form's layout."""
    rows, columns = form.shape[2:] if form.layout == "NCHW" else form.shape[1:3]
    random = np.random.default_rng(0)
    frequency = np.hypot(np.fft.fftfreq(rows)[:, None], np.fft.fftfreq(columns)[None])
    frequency[0, 0] = np.inf

    def plane() -> Values:
        noise = np.fft.ifft2(np.fft.fft2(random.normal(size=(rows, columns))) / frequency).real
        return np.asarray(noise / max(noise.std(), 1e-9), np.float64)

    grey = plane()
    colors = [TEXTURE_MEAN + TEXTURE_SPREAD * (0.9 * grey + 0.4 * plane())
              for _ in range(form.channels)]  # fmt: skip
    image = np.clip(np.stack(colors, 0 if form.layout == "NCHW" else -1), 0, 255)
    return np.asarray(image[None], np.float64)


def _mean_in(bias: Values, sums: Values) -> Values | None:
    """Return the mean that a bias, (O,), is made of: bias = -mean @ sums, (C, O)."""
    size = float(np.abs(bias).max())
    if size < LEAST_BIAS * float(np.abs(sums).max()) or len(bias) <= 2 * len(sums):
        return None
    mean, _, rank, _ = np.linalg.lstsq(-sums.T, bias, rcond=None)
    left = float(np.abs(bias + mean @ sums).max())
    return np.asarray(mean) if rank == len(sums) and left < EXACT * size else None
