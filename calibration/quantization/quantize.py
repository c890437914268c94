"""Quantises a network to INT8 with NNCF, with accuracy control where that costs too much."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import nncf
import numpy as np
import openvino as ov

from calibration.statistics import Paired, Rightness
from models.cpus import available_cpus, cpu_model, instructions_of
from models.drop_rule import judged, outcome_of
from models.manifest import QuantizationOptions
from models.runtime import CompiledNetwork, Pixels, RuntimeOptions, fixed_batch

BATCH = 8
MOVING = {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "MaxPool"}
COMPUTING = {"Convolution", "GroupConvolution", "MatMul", "ConvolutionBackpropData"}


@dataclass(frozen=True)
class Labelled:
    """Images in memory with their classes: uint8 (N, H, W, 3) BGR, int64 (N,)."""

    pixels: Pixels
    truth: np.ndarray


@dataclass(frozen=True)
class Quantized:
    """An INT8 network and how it came out."""

    model: ov.Model
    compared: Paired | None = None  # float, INT8 on the validation images; None: not measured
    first_drop: float | None = None  # before accuracy control, if that was needed
    left_float: tuple[str, ...] = ()  # layers that accuracy control took back to float

    @property
    def drop(self) -> float | None:
        """Float top-1 minus INT8 top-1 on the validation images; None: not measured."""
        return None if self.compared is None else self.compared.difference

    @property
    def is_retried(self) -> bool:
        """Whether plain quantisation cost too much."""
        return self.first_drop is not None


def quantize(model: ov.Model, images: Sequence[Pixels], options: QuantizationOptions) -> ov.Model:
    """Quantise a folded float model; ``images`` are uint8 (H, W, 3) BGR at the input size."""
    options = with_model_type(options, model)
    batches = _calibration_batches(images, model)
    quantized: ov.Model = nncf.quantize(
        model,
        nncf.Dataset(batches),
        advanced_parameters=_advanced(model),
        **_arguments(options, len(batches)),
    )
    return quantized


def quantize_within(
    model: ov.Model,
    images: Sequence[Pixels],
    validation: Labelled | None,
    options: QuantizationOptions,
    max_drop: float,
    say: Callable[[str], None] = lambda _: None,
    num_members: int = 1,
) -> Quantized:
    """Quantise; where that costs too much top-1 on ``validation``, keep layers float.

    Too much is what the accuracy gate would refuse of one of ``num_members``. NNCF's accuracy
    control then takes layers back to float, the most harmful first, until the drop is within
    ``max_drop`` or nothing is left to take back.
    """
    plain = quantize(model, images, options)
    if validation is None:
        return Quantized(plain)
    before = rightness(model, validation)
    compared = Paired.of(before, rightness(plain, validation))
    drop = compared.difference
    if not is_too_much(compared, max_drop, num_members):
        return Quantized(plain, compared)
    say(f"drops {drop * 100:.2f} points, over {max_drop * 100:.2f}: layers go back to float")
    batches = _calibration_batches(images, model)
    controlled: ov.Model = nncf.quantize_with_accuracy_control(
        model,
        calibration_dataset=nncf.Dataset(batches),
        validation_dataset=nncf.Dataset(list(_batched(validation, fixed_batch(model)))),
        validation_fn=_validate,
        max_drop=max_drop,
        drop_type=nncf.DropType.ABSOLUTE,
        advanced_quantization_parameters=_advanced(model),
        **_arguments(with_model_type(options, model), len(batches)),
    )
    now = Paired.of(before, rightness(controlled, validation))
    left = sorted(quantized_layers(plain) - quantized_layers(controlled))
    return Quantized(controlled, now, drop, tuple(left))


def is_too_much(compared: Paired, max_drop: float, num_members: int) -> bool:
    """Whether the accuracy gate refuses what one of ``num_members`` lost."""
    judgements = judged({"": compared.drop}, compared.num_images, max_drop, num_members)
    return outcome_of(judgements) == "refused"


def with_model_type(options: QuantizationOptions, model: ov.Model) -> QuantizationOptions:
    """Return the options with what NNCF is to take the network for, if they do not say."""
    if options.model_type is not None:
        return options
    found = "transformer" if has_attention(model) else "convolutional"
    return options.model_copy(update={"model_type": found})


def has_attention(model: ov.Model) -> bool:
    """Whether any product of matrices takes the output of a softmax, as attention does."""
    for node in model.get_ordered_ops():
        if node.get_type_name() == "ScaledDotProductAttention":
            return True
        if node.get_type_name() == "MatMul":
            source = node.input_value(0).get_node()
            while source.get_type_name() in MOVING:
                source = source.input_value(0).get_node()
            if source.get_type_name() == "Softmax":
                return True
    return False


def _calibration_batches(images: Sequence[Pixels], model: ov.Model) -> list[Pixels]:
    """Return the images one by one, or as many at a time as the network was exported for."""
    pixels = np.stack(images)
    return [pixels[places] for places in _places(len(images), fixed_batch(model) or 1)]


def _advanced(model: ov.Model) -> nncf.AdvancedQuantizationParameters:
    """Let NNCF take each image of a batch that is built in by itself, as it does others.

    AVX2 adds two products of INT8 in 16 bits, which saturate: without VNNI weights take 7 bits
    (DECISIONS.md, "Seven bits on AVX2").
    """
    is_avx2_alone = instructions_of(cpu_model()) == "avx2"
    return nncf.AdvancedQuantizationParameters(
        batchwise_statistics=True if (fixed_batch(model) or 1) > 1 else None,
        overflow_fix=nncf.OverflowFix.ENABLE if is_avx2_alone else None,
    )


def _arguments(options: QuantizationOptions, num_batches: int) -> dict[str, Any]:
    ignored = nncf.IgnoredScope(
        names=list(options.ignored_names), types=list(options.ignored_types), validate=True
    )
    return {
        "preset": nncf.QuantizationPreset(options.preset),
        "subset_size": num_batches,
        "fast_bias_correction": options.fast_bias_correction,
        # NNCF then recommends smooth quantisation and applies it, alpha as it finds best.
        "model_type": nncf.ModelType.TRANSFORMER if options.model_type == "transformer" else None,
        "ignored_scope": ignored if options.ignored_names or options.ignored_types else None,
    }


def _places(num_images: int, fixed: int) -> list[np.ndarray]:
    """Return the images of each batch of exactly ``fixed``; the first ones fill up the last."""
    num_batches = -(-num_images // fixed)
    return np.split(np.resize(np.arange(num_images), num_batches * fixed), num_batches)


def _batched(labelled: Labelled, fixed: int | None) -> Iterable[tuple[Pixels, np.ndarray]]:
    """Yield batches of ``fixed`` images, or of up to 8."""
    num_images = len(labelled.truth)
    ends = np.arange(BATCH, num_images, BATCH)
    for part in _places(num_images, fixed) if fixed else np.split(np.arange(num_images), ends):
        yield labelled.pixels[part], labelled.truth[part]


def _validate(
    compiled: ov.CompiledModel, batches: Iterable[tuple[Pixels, np.ndarray]]
) -> tuple[float, None]:
    """Return the top-1, as NNCF asks for it; no value per image: it then ranks by outputs."""
    right = total = 0
    for pixels, truth in batches:
        right += int((compiled([pixels])[0].argmax(axis=1) == truth).sum())
        total += len(truth)
    return right / total, None


def rightness(model: ov.Model, labelled: Labelled) -> Rightness:
    """Return for each image (N,) whether its likeliest class is right; floats run in f32."""
    options = RuntimeOptions(num_threads=available_cpus(), batch_sizes=(BATCH,))
    network = CompiledNetwork(model, options)
    found = [
        network.infer(pixels).argmax(axis=1) == truth for pixels, truth in _batched(labelled, None)
    ]
    return np.concatenate(found)


def quantized_layers(model: ov.Model) -> set[str]:
    """Return the names of the computing layers whose activations are quantised."""
    return {
        node.get_friendly_name()
        for node in model.get_ordered_ops()
        if node.get_type_name() in COMPUTING and _is_fed_quantized(node)
    }


def _is_fed_quantized(node: ov.Node) -> bool:
    """Follow the activation input upwards through layers that only move values."""
    source = node.input_value(0).get_node()
    while source.get_type_name() in MOVING:
        source = source.input_value(0).get_node()
    return bool(source.get_type_name() == "FakeQuantize")
