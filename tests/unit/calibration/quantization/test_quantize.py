"""NNCF on tiny networks: INT8 that answers as before, and layers that go back to float."""

import numpy as np
import openvino as ov
import pytest

from calibration.quantization.quantize import (
    Labelled,
    quantize,
    quantize_within,
    quantized_layers,
    rightness,
)
from models.manifest import QuantizationOptions
from models.openvino_network import CompiledNetwork, RuntimeOptions
from tests.support.tiny_networks import SIZE, fragile_model, tiny_model

# NNCF's own imports use what Python and torch deprecate.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
OPTIONS = QuantizationOptions(subset_size=12)


@pytest.fixture(scope="module")
def labelled() -> Labelled:
    """Noise with one colour stronger: 24 images, 8 of each class."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 80, (24, SIZE, SIZE, 3))
    truth = np.arange(24) % 3
    for image, channel in zip(pixels, truth, strict=True):
        image[..., channel] += 100
    return Labelled(pixels.astype(np.uint8), truth)


@pytest.fixture(scope="module")
def images(labelled: Labelled) -> list[np.ndarray]:
    return list(labelled.pixels[:12])


def has_fake_quantize(model: ov.Model) -> bool:
    return any(node.get_type_name() == "FakeQuantize" for node in model.get_ops())


def test_int8_answers_nearly_as_float(images: list[np.ndarray], labelled: Labelled) -> None:
    model = tiny_model(num_convolutions=2)
    quantized = quantize(model, images, OPTIONS)
    assert has_fake_quantize(quantized)
    assert not has_fake_quantize(model)
    options = RuntimeOptions(batch_sizes=(8,))
    before, after = (
        CompiledNetwork(m, options).predict(labelled.pixels[:8]) for m in (model, quantized)
    )
    np.testing.assert_allclose(after, before, atol=0.05)


def test_the_same_images_give_the_same_network(images: list[np.ndarray]) -> None:
    first, second = (quantize(tiny_model(num_convolutions=2), images, OPTIONS) for _ in "ab")
    options = RuntimeOptions(batch_sizes=(8,))
    rows = [CompiledNetwork(m, options).predict(np.stack(images[:8])) for m in (first, second)]
    np.testing.assert_array_equal(rows[0], rows[1])


def test_an_ignored_type_stays_float(images: list[np.ndarray]) -> None:
    options = OPTIONS.model_copy(update={"ignored_types": ("Convolution",)})
    everything = quantize(tiny_model(num_convolutions=2), images, OPTIONS)
    ignored = quantize(tiny_model(num_convolutions=2), images, options)
    assert len(quantized_layers(everything)) > len(quantized_layers(ignored))


def test_without_validation_images_nothing_is_measured(images: list[np.ndarray]) -> None:
    outcome = quantize_within(tiny_model(), images, None, OPTIONS, 0.0)
    assert (outcome.drop, outcome.is_retried) == (None, False)


def test_a_network_that_keeps_its_accuracy_is_not_retried(
    images: list[np.ndarray], labelled: Labelled
) -> None:
    outcome = quantize_within(tiny_model(), images, labelled, OPTIONS, 0.0)
    assert (outcome.drop, outcome.is_retried, outcome.left_float) == (0.0, False, ())


def test_layers_go_back_to_float_until_the_drop_is_within_the_limit(
    images: list[np.ndarray], labelled: Labelled
) -> None:
    said: list[str] = []
    assert rightness(fragile_model(), labelled).all()
    outcome = quantize_within(fragile_model(), images, labelled, OPTIONS, 0.01, said.append)
    assert outcome.first_drop is not None
    assert outcome.first_drop > 0.5
    assert outcome.drop == 0.0
    assert "gather" in outcome.left_float  # the layer whose input has the large feature
    assert "over 1.00" in said[0]
    assert rightness(outcome.model, labelled).all()


@pytest.mark.parametrize("batch", [1, 5])
def test_a_network_whose_batch_is_built_in(
    images: list[np.ndarray], labelled: Labelled, batch: int
) -> None:
    """12 images and 24 do not come out even in fives."""
    model = fragile_model()
    model.reshape([batch, SIZE, SIZE, 3])
    plain = quantize_within(model, images, labelled, OPTIONS, max_drop=1.0)
    controlled = quantize_within(model, images, labelled, OPTIONS, max_drop=0.0)
    assert has_fake_quantize(plain.model)
    assert controlled.is_retried
    assert controlled.drop == 0
    for quantized in (plain, controlled):
        assert quantized.model.input().shape[0] == batch
        assert quantized.compared is not None
        assert quantized.compared.num_images == 24


def test_the_batch_size_that_is_built_in_hardly_changes_int8(
    images: list[np.ndarray], labelled: Labelled
) -> None:
    rows = []
    for batch in (None, 4):
        model = tiny_model(num_convolutions=2)
        if batch:
            model.reshape([batch, SIZE, SIZE, 3])
        network = CompiledNetwork(
            quantize(model, images, OPTIONS), RuntimeOptions(batch_sizes=(8,))
        )
        rows.append(network.predict(labelled.pixels[:8]))
    np.testing.assert_allclose(rows[0], rows[1], atol=0.005)
