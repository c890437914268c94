"""The drop that ``tandem quantize`` measures: it can refuse the set, and never verify it."""

import hashlib
import shutil
from dataclasses import replace

import openvino as ov
import pytest

from app.errors import UnverifiedError
from app.graph.set_checks import check_accuracy
from app.settings import Settings
from calibration.quantization import calibration_images
from calibration.quantization import quantize_set as module
from calibration.quantization.quantize import Labelled, Quantized, rightness
from calibration.quantization.quantize_set import Request, quantize_set
from calibration.statistics import Paired
from models.errors import ModelSetError
from models.image import ImageInputs, ImageRule
from models.ledger import judge
from models.manifest import read_manifest
from models.model_set import load_model_set
from models.record import sha256_of
from tests.support.command_line import tandem
from tests.support.tiny_networks import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def wrong(model: ov.Model, _: object, validation: Labelled, *__: object) -> Quantized:
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


INPUTS = ImageInputs({"a": ImageRule(16, 18)})


def test_validation_images_that_calibrate_are_refused(folder, pictures, tmp_path):
    model_set = load_model_set(str(folder))
    drawn = calibration_images.draw_images(pictures, 12, INPUTS)
    copies = shutil.copytree(pictures, tmp_path / "copies")
    for validation in (pictures, copies):
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
