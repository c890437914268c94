"""Whether a batch is answered as its images are one by one, with few and with many classes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibration.sets.input import InputForm, rows_alike, set_shape, trial_images
from models.errors import ModelSetError
from models.openvino_network import CompiledNetwork, RuntimeOptions
from tests.support.drawn_networks import FAULTS, SIZE, random_model

SHARPNESS = {10: 0.3, 1000: 0.08}  # a thousand classes share what ten have


@pytest.fixture(scope="module", params=[10, 1000])
def network(request: pytest.FixtureRequest) -> CompiledNetwork:
    model = random_model(request.param, SHARPNESS[request.param])
    return CompiledNetwork(model, RuntimeOptions(batch_sizes=(4,)))


@pytest.mark.parametrize("fault", FAULTS)
def test_other_pixels_are_not_alike(network, fault):
    """Noise: of a thousand classes none has much, and 0.05 of a probability was allowed."""
    images = trial_images(4, (SIZE, SIZE, 3))
    expected, wrong = network.predict(images), network.predict(FAULTS[fault](images))
    assert rows_alike(expected, expected)
    assert not rows_alike(expected, wrong)


def test_rounding_is_alike_and_one_other_image_or_nan_is_not(network):
    expected = network.predict(trial_images(4, (SIZE, SIZE, 3)))
    wrong = expected.copy()
    wrong[3] = np.roll(wrong[3], 1)
    assert not rows_alike(expected, wrong)
    expected = network.predict(trial_images(4, (SIZE, SIZE, 3)))
    noise = np.random.default_rng(2).uniform(0.95, 1.05, expected.shape)
    assert rows_alike(expected, (expected * noise).astype(np.float32))
    expected = network.predict(trial_images(4, (SIZE, SIZE, 3)))
    assert not rows_alike(expected, np.full_like(expected, np.nan))


def test_an_error_without_text_is_named_by_its_kind():
    class Shapeless:
        def reshape(self, _: object) -> None:
            raise RuntimeError

    model: Any = Shapeless()
    with pytest.raises(ModelSetError, match=r"net\.onnx cannot take 8 px: RuntimeError"):
        set_shape(model, Path("net.onnx"), InputForm(8))
