"""The golden check: the same images everywhere, the same answers or a refusal."""

import hashlib

import numpy as np
import pytest

from models import golden
from models.errors import ModelSetError
from models.golden import GoldenMismatchError, answer_of, check, compare, golden_images
from models.golden_record import NUM_IMAGES, Golden, GoldenAnswer, read_golden
from models.runtime import CompiledNetwork, RuntimeOptions
from tests.support.scored_sets import scored_model
from tests.support.tiny_networks import tiny_model

OPTIONS = RuntimeOptions(batch_sizes=(1, 8))


@pytest.fixture(scope="module")
def network() -> CompiledNetwork:
    return CompiledNetwork(tiny_model(gain=8.0), OPTIONS)


@pytest.fixture(scope="module")
def answer(network: CompiledNetwork) -> GoldenAnswer:
    return answer_of(network)


def rows(answer: GoldenAnswer) -> np.ndarray:
    """Give the answers back as a network would: (32, 3)."""
    found = np.zeros((NUM_IMAGES, 3), np.float32)
    for row, expected in zip(found, answer.rows, strict=True):
        for index, probability in expected:
            row[index] = probability
    return found


@pytest.mark.parametrize(
    ("size", "digest"),
    [
        (16, "7c1dc37fc69657ce"),
        (128, "fefd1b6d53085ad3"),
        (224, "a835ba64d7fbc772"),
    ],
)
def test_the_images_are_the_same_on_every_machine(size: int, digest: str) -> None:
    """Pinned: sets that are out there were recorded on these very images."""
    images = golden_images(size)
    assert images.shape == (NUM_IMAGES, size, size, 3)
    assert images.dtype == np.uint8
    assert hashlib.sha256(images.tobytes()).hexdigest()[:16] == digest


@pytest.mark.parametrize("size", [1, 2, 7])
def test_small_networks_have_images_too(size: int) -> None:
    assert golden_images(size).shape == (NUM_IMAGES, size, size, 3)


def test_the_images_differ_from_each_other() -> None:
    assert len({image.tobytes() for image in golden_images(32)}) == NUM_IMAGES


def test_a_network_passes_its_own_check(network: CompiledNetwork, answer: GoldenAnswer) -> None:
    check(Golden(answers={"m": {"INT8": answer}}), "m", "INT8", network)


def test_batches_of_any_size_give_the_same_answers(answer: GoldenAnswer) -> None:
    for sizes in ((1,), (5,), (64,)):
        network = CompiledNetwork(tiny_model(gain=8.0), RuntimeOptions(batch_sizes=sizes))
        assert compare(answer, rows(answer_of(network))) is None


def test_another_network_is_refused_with_both_machines_named(answer: GoldenAnswer) -> None:
    elsewhere = answer.model_copy(update={"cpu": "another CPU", "float_type": "bf16"})
    other = CompiledNetwork(tiny_model(gain=-8.0), OPTIONS)
    with pytest.raises(GoldenMismatchError) as caught:
        check(Golden(answers={"m": {"INT8": elsewhere}}), "m", "INT8", other)
    assert "m INT8 does not answer as where the set was made" in caught.value.message
    assert "another CPU, bf16; this is " in caught.value.message
    assert "of 32 generated images changed their class" in caught.value.message


def test_a_slightly_other_rounding_passes(answer: GoldenAnswer) -> None:
    noise = np.random.default_rng(1).uniform(-0.02, 0.02, (NUM_IMAGES, 3))
    assert compare(answer, (rows(answer) + noise).astype(np.float32)) is None


def test_probabilities_off_on_average_are_refused(answer: GoldenAnswer) -> None:
    problem = compare(answer, rows(answer) * 0.8)
    assert problem is not None
    assert "are off by" in problem
    assert "0.03 is allowed" in problem


def test_nan_is_refused(answer: GoldenAnswer) -> None:
    assert compare(answer, np.full((NUM_IMAGES, 3), np.nan, np.float32)) is not None


def test_a_close_call_may_fall_the_other_way(answer: GoldenAnswer) -> None:
    unsure = [[(0, 0.41), (1, 0.40), (2, 0.19)]] * NUM_IMAGES
    expected = answer.model_copy(update={"rows": unsure})
    found = np.tile(np.array([0.40, 0.41, 0.19], np.float32), (NUM_IMAGES, 1))
    assert compare(expected, found) is None


def test_two_sure_images_that_change_are_refused(answer: GoldenAnswer) -> None:
    sure = [[(0, 0.9), (1, 0.1), (2, 0.0)]] * NUM_IMAGES
    expected = answer.model_copy(update={"rows": sure})
    found = np.tile(np.array([0.9, 0.1, 0.0], np.float32), (NUM_IMAGES, 1))
    assert compare(expected, found) is None
    found[7] = [0.45, 0.55, 0.0]
    assert compare(expected, found) is None  # one may be rounding
    found[9] = [0.45, 0.55, 0.0]
    problem = compare(expected, found)
    assert problem is not None
    assert "image 7 was class 0 at 0.90, now class 1 at 0.55" in problem


def test_a_network_without_recorded_answers_is_an_error(network: CompiledNetwork) -> None:
    with pytest.raises(ModelSetError, match="no answers of m INT8"):
        check(Golden(answers={}), "m", "INT8", network)


def test_a_damaged_file_is_an_error(tmp_path, answer: GoldenAnswer) -> None:
    path = tmp_path / "golden.json"
    path.write_text(Golden(answers={"m": {"INT8": answer}}).model_dump_json())
    assert read_golden(path).answers["m"]["INT8"] == answer
    path.write_text(path.read_text()[:-30])
    with pytest.raises(ModelSetError, match=r"golden\.json"):
        read_golden(path)
    with pytest.raises(ModelSetError, match="cannot read"):
        read_golden(tmp_path / "none.json")


def test_only_the_likeliest_classes_are_kept(answer: GoldenAnswer) -> None:
    assert golden.NUM_KEPT == 5
    for row in answer.rows:
        assert [p for _, p in row] == sorted((p for _, p in row), reverse=True)


def test_scores_of_a_multi_label_set_are_compared_as_they_are() -> None:
    """One that answers the opposite, or less than half, is found; one that rounds is not."""
    recorded = answer_of(CompiledNetwork(scored_model(12.0), OPTIONS))
    expected = Golden(answers={"one": {"INT8": recorded}})
    check(expected, "one", "INT8", CompiledNetwork(scored_model(12.1), OPTIONS))
    for gain in (-12.0, 2.0):
        with pytest.raises(GoldenMismatchError, match="does not answer as where the set was made"):
            check(expected, "one", "INT8", CompiledNetwork(scored_model(gain), OPTIONS))
