"""The members' networks over many images: in batches, by threads, in order."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibration.datasets import read_dataset
from calibration.evaluation.inference import Networks, batches, through_threads
from models.image import read_image
from models.model_set import load_model_set
from models.openvino_network import CompiledNetwork, RuntimeOptions
from models.record import ImageRecord
from tests.support.tiny_networks import write_tiny_set

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def test_order_and_work_are_kept_by_the_threads() -> None:
    assert list(through_threads(lambda n: n * n, range(50), 3)) == [n * n for n in range(50)]
    assert [list(b) for b in batches(list(range(5)), 2)] == [[0, 1], [2, 3], [4]]


def test_only_a_few_items_are_taken_ahead() -> None:
    taken: list[int] = []

    def items() -> object:
        for n in range(100):
            taken.append(n)
            yield n

    answers: Any = through_threads(lambda n: n, items(), 2)  # type: ignore[arg-type]
    assert next(answers) == 0
    assert len(taken) <= 6
    answers.close()
    assert len(taken) <= 6


def test_an_error_in_one_batch_ends_the_run() -> None:
    def fail(n: int) -> int:
        if n == 3:
            raise ValueError("three")
        return n

    with pytest.raises(ValueError, match="three"):
        list(through_threads(fail, range(1000), 2))


def test_batches_give_what_single_images_give(tiny_set: Path, pictures: Path) -> None:
    model_set = load_model_set(str(tiny_set))
    images = read_dataset(pictures, model_set).images
    networks = Networks(model_set, ("INT8",))
    together = networks.answer(images[:8])
    for index, image in enumerate(images[:8]):
        alone = networks.answer([image])
        for name, rows in alone.probabilities["INT8"].items():
            np.testing.assert_allclose(
                rows[0], together.probabilities["INT8"][name][index], atol=1e-5
            )


def test_members_get_the_inputs_that_are_theirs(tmp_path: Path, pictures: Path) -> None:
    small = ImageRecord(input_size=8, resize_shorter=9)
    folder = write_tiny_set(
        tmp_path / "two", gains={"usual": 8.0, "small": 2.0}, images={"small": small}
    )
    model_set = load_model_set(str(folder))
    images = read_dataset(pictures, model_set).images[:3]
    found = Networks(model_set, ("INT8",)).answer(images).probabilities["INT8"]
    options = RuntimeOptions(batch_sizes=(3,))
    for name in ("usual", "small"):
        rule = model_set.manifest.image_of(name).rule
        pixels = np.stack([read_image(image.path.read_bytes(), rule) for image in images])
        alone = CompiledNetwork(model_set.network_path(name), options).predict(pixels)
        np.testing.assert_allclose(found[name], alone, atol=1e-5)
