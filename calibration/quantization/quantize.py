"""Quantises a network to INT8 with NNCF, with accuracy control if that loses too much."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import nncf
import numpy as np
import openvino as ov

from calibration.statistics import Paired, Rightness
from models.ensemble import Probabilities
from models.errors import ModelSetError
from models.ledger import judged, outcome_of
from models.machine import available_cpus, cpu_model, instructions_of
from models.manifest import QuantizationOptions
from models.openvino_network import CompiledNetwork, Pixels, RuntimeOptions, fixed_batch
from models.record import wilson_interval

BATCH = 8
MOVING = {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "MaxPool"}
COMPUTING = {"Convolution", "GroupConvolution", "MatMul", "ConvolutionBackpropData"}


@dataclass(frozen=True)
class Labelled:
    """Images in memory with their classes: uint8 (N, H, W, 3) BGR, int64 (N,)."""

    pixels: Pixels
    truth: np.ndarray


@dataclass(frozen=True)
class Changes:
    """How often INT8 answers otherwise than float, where no labels say which is right.

    ``interval`` is 95 %, of the share of images; ``mean_difference`` that of the probability (of a
    multi-label network, of the largest difference of a score) of float's first class.
    """

    num_images: int
    num_changed: int
    interval: tuple[float, float]
    mean_difference: float


@dataclass(frozen=True)
class Quantized:
    """An INT8 network and its measured loss."""

    model: ov.Model
    compared: Paired | None = None  # float and INT8 on the validation images; None: not measured
    first_drop: float | None = None  # before accuracy control, if that was used
    left_float: tuple[str, ...] = ()  # layers that accuracy control returned to float
    changes: Changes | None = None  # without validation images

    @property
    def drop(self) -> float | None:
        """Float top-1 minus INT8 top-1 on the validation images; None: not measured."""
        return None if self.compared is None else self.compared.difference

    @property
    def is_retried(self) -> bool:
        """Whether plain quantisation lost too much."""
        return self.first_drop is not None


def quantize(model: ov.Model, images: Sequence[Pixels], options: QuantizationOptions) -> ov.Model:
    """Quantise a folded float network; ``images`` are uint8 (H, W, 3) BGR at the input size."""
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
    """Quantise; if that loses too much top-1 on ``validation``, keep layers float.

    Too much is a loss that the accuracy gate would refuse for one of ``num_members``. Then NNCF's
    accuracy control returns layers to float, the most harmful first, until the drop is within
    ``max_drop`` or no layers are left.
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
    """Whether the accuracy gate refuses this loss of one of ``num_members``."""
    judgements = judged({"": compared.drop}, compared.num_images, max_drop, num_members)
    return outcome_of(judgements) == "refused"


def with_model_type(options: QuantizationOptions, model: ov.Model) -> QuantizationOptions:
    """Return the options with the network's kind for NNCF, if they do not set it."""
    if options.model_type is not None:
        return options
    model_type = "transformer" if has_attention(model) else "convolutional"
    return options.model_copy(update={"model_type": model_type})


def has_attention(model: ov.Model) -> bool:
    """Whether any matrix product has the output of a softmax as input, as in attention."""
    for node in model.get_ordered_ops():
        if node.get_type_name() == "ScaledDotProductAttention":
            return True
        if node.get_type_name() == "MatMul" and _type_of_source(node) == "Softmax":
            return True
    return False


def _calibration_batches(images: Sequence[Pixels], model: ov.Model) -> list[Pixels]:
    """Return the images one by one, or in batches if the network has a fixed batch size."""
    pixels = np.stack(images)
    return [pixels[places] for places in _places(len(images), fixed_batch(model) or 1)]


def _advanced(model: ov.Model) -> nncf.AdvancedQuantizationParameters:
    """Return NNCF's advanced parameters for this network and CPU.

    With a fixed batch size, activations are sampled per image, as without one. AVX2 adds two INT8
    products in 16 bits, which saturate: on CPUs without VNNI weights use 7 bits (decision 0018).
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
        # With this NNCF uses smooth quantisation, and chooses its alpha.
        "model_type": nncf.ModelType.TRANSFORMER if options.model_type == "transformer" else None,
        "ignored_scope": ignored if options.ignored_names or options.ignored_types else None,
    }


def _places(num_images: int, fixed: int) -> list[np.ndarray]:
    """Return the images' indices for batches of exactly ``fixed``.

    The first images fill up the last batch.
    """
    num_batches = -(-num_images // fixed)
    return np.split(np.resize(np.arange(num_images), num_batches * fixed), num_batches)


def _batched(labelled: Labelled, fixed: int | None) -> Iterable[tuple[Pixels, np.ndarray]]:
    """Yield batches of ``fixed`` images; None: of up to 8."""
    num_images = len(labelled.truth)
    ends = np.arange(BATCH, num_images, BATCH)
    for part in _places(num_images, fixed) if fixed else np.split(np.arange(num_images), ends):
        yield labelled.pixels[part], labelled.truth[part]


def _validate(
    compiled: ov.CompiledModel, batches: Iterable[tuple[Pixels, np.ndarray]]
) -> tuple[float, None]:
    """Return the top-1 for NNCF, without values per image: NNCF then ranks layers by outputs."""
    right = total = 0
    for pixels, truth in batches:
        right += int((compiled([pixels])[0].argmax(axis=1) == truth).sum())
        total += len(truth)
    return right / total, None


def rightness(model: ov.Model, labelled: Labelled) -> Rightness:
    """Return for each image (N,) whether its likeliest class is right; float layers run in f32."""
    right: Rightness = _rows(model, labelled).argmax(axis=1) == labelled.truth
    return right


def changes(before: ov.Model, after: ov.Model, pixels: Pixels, threshold: float | None) -> Changes:
    """Compare two networks on images without labels; ``threshold`` is a multi-label set's."""
    unlabelled = Labelled(pixels, np.zeros(len(pixels), np.int64))
    was, now = (_rows(model, unlabelled) for model in (before, after))
    if threshold is None:
        first = was.argmax(axis=1)
        places = np.arange(len(was)), first
        is_other, differences = now.argmax(axis=1) != first, np.abs(was[places] - now[places])
    else:
        is_other = ((was >= threshold) != (now >= threshold)).any(axis=1)
        differences = np.abs(was - now).max(axis=1)
    num, total = int(is_other.sum()), len(was)
    return Changes(total, num, wilson_interval(num, total), float(differences.mean()))


def _rows(model: ov.Model, labelled: Labelled) -> Probabilities:
    options = RuntimeOptions(num_threads=available_cpus(), batch_sizes=(BATCH,))
    network = CompiledNetwork(model, options)
    return np.concatenate([network.predict(p) for p, _ in _batched(labelled, None)])


def quantized_layers(model: ov.Model) -> set[str]:
    """Return the names of the computing layers with quantised activations."""
    return {
        node.get_friendly_name()
        for node in model.get_ordered_ops()
        if node.get_type_name() in COMPUTING and _type_of_source(node) == "FakeQuantize"
    }


def _type_of_source(node: ov.Node) -> str:
    """Return what computes a node's first input, upwards of layers that only move values."""
    source = node.input_value(0).get_node()
    while source.get_type_name() in MOVING:
        source = source.input_value(0).get_node()
    return str(source.get_type_name())


def check_ignored(member: str, options: QuantizationOptions, model: ov.Model) -> None:
    """Raise :class:`ModelSetError` if the network lacks an operation that should stay float."""
    operations = model.get_ops()
    known = {
        "ignored_names": (options.ignored_names, {o.get_friendly_name() for o in operations}),
        "ignored_types": (options.ignored_types, {o.get_type_name() for o in operations}),
    }
    for field, (asked, there) in known.items():
        for name in asked:
            if name not in there:
                close = get_close_matches(name, there, n=3, cutoff=0.5) or sorted(there)[:3]
                raise ModelSetError(
                    f"member {member}, quantization.{field}: its network has no {name!r}; did you "
                    f"mean {', '.join(close)}? Correct the set's manifest.yaml"
                )


@contextmanager
def nncf_errors(member: str) -> Iterator[None]:
    """Raise :class:`ModelSetError` in place of NNCF's errors during the block."""
    classes = (value for value in vars(nncf).values() if isinstance(value, type))
    of_nncf = (kind for kind in classes if issubclass(kind, Exception))  # they have no common base
    kinds: tuple[type[Exception], ...] = (RuntimeError, *of_nncf)
    try:
        yield
    except kinds as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = lines[-1] if lines else type(error).__name__
        raise ModelSetError(
            f"NNCF cannot quantise member {member}: {reason}. Leave the operations that it names "
            "to float (quantization.ignored_names in manifest.yaml), or export the network anew"
        ) from error
