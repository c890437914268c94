"""The golden check: the same images everywhere, the same answers or a refusal."""

import hashlib
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from calibration.sets.add_set import add_set
from models import golden
from models.errors import ModelSetError
from models.model_set import load_model_set
from models.openvino_network import CompiledNetwork, RuntimeOptions
from tests.support.cases import cases
from tests.support.drawn_networks import FAULTS, SIZE, random_model
from tests.support.imagenet_small import new_set
from tests.support.scored_sets import scored_model
from tests.support.tiny_networks import tiny_model

OPTIONS, EIGHT = RuntimeOptions(batch_sizes=(1, 8)), RuntimeOptions(batch_sizes=(8,))
SHARPNESS = {10: 0.3, 1000: 0.08}  # a thousand classes share what ten have


@pytest.fixture(scope="module")
def network() -> CompiledNetwork:
    return CompiledNetwork(tiny_model(gain=8.0), OPTIONS)


@pytest.fixture(scope="module")
def answer(network: CompiledNetwork) -> golden.GoldenAnswer:
    return golden.answer_of(network)


@cache
def bundled(name: str) -> CompiledNetwork:
    return CompiledNetwork(load_model_set("imagenette").network_path(name), EIGHT)


@pytest.fixture(scope="module")
def mobilenet(shared_data, tmp_path_factory):
    all_three = new_set(shared_data / "imagenet-small")
    new = replace(all_three, members=[member for member in all_three.members if member[0] == "v1"])
    return CompiledNetwork(add_set(new, tmp_path_factory.mktemp("sets")).network_path("v1"), EIGHT)


def predicted(network: CompiledNetwork, images: np.ndarray) -> np.ndarray:
    return np.concatenate(
        [network.predict(images[i : i + 8]) for i in range(0, golden.NUM_IMAGES, 8)]
    )


def rows(answer: golden.GoldenAnswer) -> np.ndarray:
    """Give the answers back as a network would: (32, 3)."""
    found = np.zeros((golden.NUM_IMAGES, 3), np.float32)
    for row, expected in zip(found, answer.rows, strict=True):
        for index, probability in expected:
            row[index] = probability
    return found


@cases(
    "size, digest", (16, "7c1dc37fc69657ce"), (128, "fefd1b6d53085ad3"), (224, "a835ba64d7fbc772")
)
def test_the_images_are_the_same_on_every_machine(size, digest):
    """Pinned: sets that are out there were recorded on these very images."""
    images = golden.golden_images(size)
    assert (images.shape, images.dtype) == ((golden.NUM_IMAGES, size, size, 3), np.uint8)
    assert len({image.tobytes() for image in images}) == golden.NUM_IMAGES
    assert hashlib.sha256(images.tobytes()).hexdigest()[:16] == digest


@pytest.mark.parametrize("size", [1, 2, 7])
def test_small_networks_have_images_too(size):
    assert golden.golden_images(size).shape == (golden.NUM_IMAGES, size, size, 3)


def test_a_network_passes_its_own_check_in_batches_of_any_size(network, answer):
    golden.check(golden.Golden(answers={"m": {"INT8": answer}}), "m", "INT8", network)
    for sizes in ((1,), (5,), (64,)):
        other = CompiledNetwork(tiny_model(gain=8.0), RuntimeOptions(batch_sizes=sizes))
        assert golden.compare(answer, rows(golden.answer_of(other))) is None


def test_another_network_is_refused_with_both_machines_named(answer):
    elsewhere = answer.model_copy(update={"cpu": "another CPU", "float_type": "bf16"})
    other = CompiledNetwork(tiny_model(gain=-8.0), OPTIONS)
    with pytest.raises(golden.GoldenMismatchError) as caught:
        golden.check(golden.Golden(answers={"m": {"INT8": elsewhere}}), "m", "INT8", other)
    for said in (
        "m INT8 does not answer as where the set was made",
        "another CPU, bf16; this is ",
        "of 32 generated images changed their class",
    ):
        assert said in caught.value.message


def test_a_slightly_other_rounding_passes_and_probabilities_off_on_average_do_not(answer):
    noise = np.random.default_rng(1).uniform(-0.02, 0.02, (golden.NUM_IMAGES, 3))
    assert golden.compare(answer, (rows(answer) + noise).astype(np.float32)) is None
    lower = rows(answer) * np.float32(0.8)
    assert "are off by 20% of their sum; 10% is allowed" in str(golden.compare(answer, lower))
    assert golden.compare(answer, lower, golden.OTHER_CPU_TOLERANCE) is None


@pytest.mark.parametrize("num_classes", [10, 1000])
@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_pixels_are_found_with_few_and_with_many_classes(num_classes, fault):
    """Of a thousand classes each has so little that absolute differences were within the limit."""
    network = CompiledNetwork(random_model(num_classes, SHARPNESS[num_classes]), OPTIONS)
    expected = golden.answer_of(network)
    right, wrong = golden.golden_images(SIZE), FAULTS[fault](golden.golden_images(SIZE))
    assert golden.compare(expected, predicted(network, right)) is None
    assert golden.compare(expected, predicted(network, wrong)) is not None
    kept = [p for row in expected.rows for _, p in row]
    assert (sum(kept) / len(kept) < 0.05) == (num_classes == 1000)


@pytest.mark.slow  # make test has small networks, above
@pytest.mark.parametrize("fault", FAULTS)
@cases("name", "resnet50", "densenet169", pytest.param("mobilenet", marks=pytest.mark.shared_data))
def test_wrong_pixels_are_found_with_real_networks(request, name, fault):
    network = request.getfixturevalue(name) if name == "mobilenet" else bundled(name)
    images = FAULTS[fault](golden.golden_images(network.input_shape[0]))
    assert golden.compare(golden.answer_of(network), predicted(network, images)) is not None


def test_another_kind_of_cpu_may_round_more(network, answer):
    assert golden.tolerance_of(answer, network.float_type) == golden.TOLERANCE
    assert golden.tolerance_of(answer, "bf16") == golden.OTHER_CPU_TOLERANCE
    elsewhere = answer.model_copy(update={"cpu": "the same name (amx_int8)"})
    assert golden.tolerance_of(elsewhere, network.float_type) == golden.OTHER_CPU_TOLERANCE
    _, _, flags = answer.cpu.rpartition("(")
    alike = answer.model_copy(update={"cpu": f"another name ({flags}"})
    assert golden.tolerance_of(alike, network.float_type) == golden.TOLERANCE


def test_scores_near_zero_may_round_and_nan_is_refused(answer):
    nothing = [[(i, 0.0) for i in range(5)]] * golden.NUM_IMAGES
    expected = golden.GoldenAnswer(cpu="", float_type="f32", rows=nothing)
    assert golden.compare(expected, np.full((golden.NUM_IMAGES, 5), 1e-4, np.float32)) is None
    assert golden.compare(expected, np.full((golden.NUM_IMAGES, 5), 0.01, np.float32)) is not None
    assert golden.compare(answer, np.full((golden.NUM_IMAGES, 3), np.nan, np.float32)) is not None


def test_a_close_call_may_fall_the_other_way_and_two_sure_images_may_not(answer):
    unsure = [[(0, 0.48), (1, 0.47), (2, 0.05)]] * golden.NUM_IMAGES
    now = np.tile(np.array([0.47, 0.48, 0.05], np.float32), (golden.NUM_IMAGES, 1))
    assert golden.compare(answer.model_copy(update={"rows": unsure}), now) is None
    sure = [[(0, 0.9), (1, 0.1), (2, 0.0)]] * golden.NUM_IMAGES
    expected = answer.model_copy(update={"rows": sure})
    now = np.tile(np.array([0.9, 0.1, 0.0], np.float32), (golden.NUM_IMAGES, 1))
    assert golden.compare(expected, now) is None
    now[7] = [0.45, 0.55, 0.0]
    assert golden.compare(expected, now) is None  # one may be rounding
    now[9] = [0.45, 0.55, 0.0]
    assert "image 7 was class 0 at 0.90, now class 1 at 0.55" in str(golden.compare(expected, now))


def test_a_damaged_file_and_one_without_the_networks_answers_are_errors(tmp_path, network, answer):
    with pytest.raises(ModelSetError, match="no answers of m INT8"):
        golden.check(golden.Golden(answers={}), "m", "INT8", network)
    path = tmp_path / "golden.json"
    path.write_text(golden.Golden(answers={"m": {"INT8": answer}}).model_dump_json())
    assert golden.read_golden(path).answers["m"]["INT8"] == answer
    path.write_text(path.read_text()[:-30])
    with pytest.raises(ModelSetError, match=r"golden\.json"):
        golden.read_golden(path)
    with pytest.raises(ModelSetError, match="cannot read"):
        golden.read_golden(tmp_path / "none.json")


def test_only_the_likeliest_classes_are_kept(answer):
    assert golden.NUM_KEPT == 5
    for row in answer.rows:
        assert [p for _, p in row] == sorted((p for _, p in row), reverse=True)


def test_scores_of_a_multi_label_set_are_compared_as_they_are():
    """One that answers the opposite, or less than half, is found; one that rounds is not."""
    recorded = golden.answer_of(CompiledNetwork(scored_model(12.0), OPTIONS))
    expected = golden.Golden(answers={"one": {"INT8": recorded}})
    golden.check(expected, "one", "INT8", CompiledNetwork(scored_model(12.1), OPTIONS))
    for gain in (-12.0, 2.0):
        with pytest.raises(
            golden.GoldenMismatchError, match="does not answer as where the set was made"
        ):
            golden.check(expected, "one", "INT8", CompiledNetwork(scored_model(gain), OPTIONS))
