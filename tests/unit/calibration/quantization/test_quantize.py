"""NNCF on tiny networks: INT8 that answers as before, and the drop that can refuse a set."""

import hashlib
import shutil
from dataclasses import replace

import nncf
import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

from app.errors import UnverifiedError
from app.graph.served_models import check_accuracy
from app.settings import Settings
from calibration.quantization import calibration_images
from calibration.quantization import quantize_set as module
from calibration.quantization.quantize import (
    Labelled,
    Quantized,
    has_attention,
    quantize,
    quantize_within,
    quantized_layers,
    rightness,
    with_model_type,
)
from calibration.quantization.quantize_set import Request, quantize_set
from calibration.sets.transaction import write_manifest
from calibration.statistics import Paired
from models.errors import ModelSetError
from models.image import ImageInputs, ImageRule
from models.ledger import judge
from models.manifest import QuantizationOptions, read_manifest
from models.model_set import load_model_set
from models.openvino_network import CompiledNetwork, RuntimeOptions
from models.record import sha256_of
from tests.support.command_line import tandem
from tests.support.tiny_networks import (
    SIZE,
    fragile_model,
    save_model,
    tiny_model,
    write_pictures,
    write_tiny_set,
)

# NNCF's own imports use what Python and torch deprecate.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
OPTIONS = QuantizationOptions(subset_size=12)
INPUTS = ImageInputs({"a": ImageRule(16, 18)})


@pytest.fixture(scope="module")
def labelled() -> Labelled:
    """Noise with one colour stronger: 24 images, 8 of each class."""
    pixels = np.random.default_rng(0).integers(0, 80, (24, SIZE, SIZE, 3))
    truth = np.arange(24) % 3
    for image, channel in zip(pixels, truth, strict=True):
        image[..., channel] += 100
    return Labelled(pixels.astype(np.uint8), truth)


@pytest.fixture(scope="module")
def images(labelled: Labelled) -> list[np.ndarray]:
    return list(labelled.pixels[:12])


def has_fake_quantize(model: ov.Model) -> bool:
    return any(node.get_type_name() == "FakeQuantize" for node in model.get_ops())


def test_int8_answers_nearly_as_float(images, labelled):
    model = tiny_model(num_convolutions=2)
    quantized = quantize(model, images, OPTIONS)
    assert has_fake_quantize(quantized)
    assert not has_fake_quantize(model)
    options = RuntimeOptions(batch_sizes=(8,))
    before, after = (
        CompiledNetwork(m, options).predict(labelled.pixels[:8]) for m in (model, quantized)
    )
    np.testing.assert_allclose(after, before, atol=0.05)


def test_the_same_images_give_the_same_network_and_an_ignored_type_stays_float(images):
    first, second = (quantize(tiny_model(num_convolutions=2), images, OPTIONS) for _ in "ab")
    options = RuntimeOptions(batch_sizes=(8,))
    rows = [CompiledNetwork(m, options).predict(np.stack(images[:8])) for m in (first, second)]
    np.testing.assert_array_equal(rows[0], rows[1])
    fewer = OPTIONS.model_copy(update={"ignored_types": ("Convolution",)})
    ignored = quantize(tiny_model(num_convolutions=2), images, fewer)
    assert len(quantized_layers(first)) > len(quantized_layers(ignored))


def test_only_a_network_that_loses_accuracy_is_retried(images, labelled):
    outcome = quantize_within(tiny_model(), images, None, OPTIONS, 0.0)
    assert (outcome.drop, outcome.is_retried) == (None, False)
    outcome = quantize_within(tiny_model(), images, labelled, OPTIONS, 0.0)
    assert (outcome.drop, outcome.is_retried, outcome.left_float) == (0.0, False, ())


def test_layers_go_back_to_float_until_the_drop_is_within_the_limit(images, labelled):
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
def test_a_network_whose_batch_is_built_in(images, labelled, batch):
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


def test_the_batch_size_that_is_built_in_hardly_changes_int8(images, labelled):
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


def attention_model(is_fused: bool = False) -> ov.Model:
    """u8 [?,16,16,3] -> the tiny network's answer, after pixels have attended to each other.

    ``is_fused``: in one operation, as PyTorch's scaled_dot_product_attention is converted.
    """
    pixels = ops.parameter([-1, SIZE, SIZE, 3], ov.Type.u8, name="pixels")
    tokens = ops.reshape(
        ops.multiply(ops.convert(pixels, "f32"), np.float32(1 / 255)),
        np.array([0, SIZE * SIZE, 3]),
        special_zero=True,
    )
    eye = np.eye(3, dtype=np.float32)
    query, key, value = (ops.matmul(tokens, eye * g, False, False) for g in (1.0, 1.0, 8.0))
    if is_fused:
        attended = ops.scaled_dot_product_attention(query, key, value)
    else:
        weights = ops.softmax(ops.matmul(query, key, False, True), 2)
        attended = ops.matmul(weights, value, False, False)
    logits = ops.reduce_mean(attended, np.array([1]), keep_dims=False)
    return ov.Model([ops.softmax(logits, 1)], [pixels], "attention")


def test_the_model_type_is_the_options_or_seen_in_the_graph():
    assert has_attention(attention_model())
    assert has_attention(attention_model(is_fused=True))
    assert not has_attention(tiny_model())
    assert not has_attention(tiny_model(num_convolutions=2))
    asked = QuantizationOptions(model_type="convolutional")
    assert with_model_type(asked, attention_model()) == asked
    assert with_model_type(QuantizationOptions(), attention_model()).model_type == "transformer"
    assert with_model_type(QuantizationOptions(), tiny_model()).model_type == "convolutional"


@pytest.mark.parametrize(
    ("model", "expected"),
    [(attention_model, nncf.ModelType.TRANSFORMER), (tiny_model, None)],
    ids=["transformer", "convolutional"],
)
def test_nncf_is_told(monkeypatch, model, expected):
    told = []
    monkeypatch.setattr("nncf.quantize", lambda *_, **given: told.append(given))
    quantize(model(), [np.zeros((SIZE, SIZE, 3), np.uint8)], QuantizationOptions())
    assert [given["model_type"] for given in told] == [expected]


def test_the_manifest_keeps_it(tmp_path):
    folder = write_tiny_set(tmp_path / "tiny", gains={"vit": 8.0}, precision="FP16")
    network = save_model(attention_model(), folder, "attention")
    manifest = read_manifest(folder)
    vit = manifest.members[0].model_copy(update={"networks": {"FP16": network}})
    write_manifest(folder, manifest.model_copy(update={"members": (vit,)}))
    said: list[str] = []
    request = Request(write_pictures(tmp_path / "pictures"), subset_size=8)
    quantize_set(load_model_set(str(folder)), request, said.append)
    (member,) = read_manifest(folder).members
    assert member.quantization.model_type == "transformer"
    assert "INT8" in member.networks
    assert "vit: quantising on 8 images, as a transformer: smooth quantisation" in said


def wrong(model, _, validation, *__):
    """INT8 that answers all wrong, accuracy control or not."""
    inverted = tiny_model(gain=-8.0)
    compared = Paired.of(rightness(model, validation), rightness(inverted, validation))
    return Quantized(inverted, compared, first_drop=compared.difference)


def test_a_set_that_quantize_measured_over_the_limit_is_not_served(
    folder, pictures, validation, monkeypatch
):
    monkeypatch.setattr(module, "quantize_within", wrong)
    arguments = ("--images", pictures, "--subset-size", 12, "--validation", validation)
    done = tandem("quantize", folder, *arguments)
    assert done.exit_code == 1
    assert "serve will refuse it" in done.stderr
    manifest = read_manifest(folder)
    assert judge(manifest).status == "dropped"
    with pytest.raises(UnverifiedError, match=r"costs sure 100\.00 points .* \(18 images\)"):
        check_accuracy(load_model_set(str(folder)), Settings())
    kept = manifest.member("sure").validation_drop
    assert kept is not None
    assert (kept.num_images, kept.drop.top1) == (18, 1.0)
    hashes = sorted(sha256_of(path) for path in validation.glob("*/*"))
    assert kept.images_sha256 == hashlib.sha256("".join(hashes).encode()).hexdigest()


def test_quantising_another_member_does_not_forget_it(folder, pictures, validation, monkeypatch):
    request = Request(pictures, validation=validation, subset_size=12)
    with monkeypatch.context() as patch:
        patch.setattr(module, "quantize_within", wrong)
        quantize_set(load_model_set(str(folder)), request)
    quantize_set(load_model_set(str(folder)), replace(request, members=("unsure",)))
    verdict = judge(read_manifest(folder))
    assert verdict.status == "dropped"
    assert "costs sure" in verdict.message
    quantize_set(load_model_set(str(folder)), replace(request, members=("sure",)))
    assert judge(read_manifest(folder)).status == "unmeasured"


def test_a_drop_within_the_limit_verifies_nothing(folder, pictures, validation):
    request = Request(pictures, validation=validation, subset_size=12)
    quantize_set(load_model_set(str(folder)), request)
    manifest = read_manifest(folder)
    kept = manifest.member("sure").validation_drop
    assert kept is not None
    assert (kept.num_images, kept.drop.top1) == (18, 0.0)
    assert judge(manifest).status == "unmeasured"


def test_without_validation_images_no_drop_is_kept(folder, pictures):
    quantize_set(load_model_set(str(folder)), Request(pictures, subset_size=12))
    assert [m.validation_drop for m in read_manifest(folder).members] == [None, None]


def test_validation_images_that_calibrate_are_refused(folder, pictures, tmp_path):
    model_set = load_model_set(str(folder))
    drawn = calibration_images.draw_images(pictures, 12, INPUTS)
    for validation in (pictures, shutil.copytree(pictures, tmp_path / "copies")):
        with pytest.raises(ModelSetError, match="12 of 15 images calibrate INT8 too, as "):
            calibration_images.held_out(pictures, validation, model_set, drawn)


def test_why_a_folder_measures_no_drop_is_said(folder, pictures, tmp_path):
    model_set = load_model_set(str(folder))
    images = shutil.copytree(pictures, tmp_path / "images")
    first, second, *_ = sorted(images.iterdir())
    (second / "link.png").symlink_to(next(first.iterdir()))
    drawn = calibration_images.draw_images(images, 12, INPUTS)
    kept = calibration_images.held_out(images, None, model_set, drawn)
    assert "stands under the labels" in kept.description


def test_copies_of_calibration_images_are_left_out(folder, pictures, tmp_path, monkeypatch):
    monkeypatch.setattr(calibration_images, "MIN_VALIDATION", 6)
    model_set = load_model_set(str(folder))
    images = shutil.copytree(pictures, tmp_path / "images")
    for path in sorted(images.glob("*/*")):
        shutil.copy(path, path.with_stem(f"{path.stem}-copy"))
    drawn = calibration_images.draw_images(images, 12, INPUTS)
    kept = calibration_images.held_out(images, None, model_set, drawn)
    assert kept.hashes
    assert not set(kept.hashes) & set(drawn.hashes)
    monkeypatch.setattr(calibration_images, "MIN_VALIDATION", len(kept.hashes) + 1)
    few = calibration_images.held_out(images, None, model_set, drawn)
    assert few.labelled is None
    assert few.description.startswith(f"{len(kept.hashes)} images are left for it")
