"""``tandem evaluate --sure-at``: the bound is that of the data, judged on others, and written.

``tandem evaluate --calibrate``: known temperatures are found, written, and served by.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from calibration.commands import evaluate as command
from calibration.datasets import LabelledImage
from calibration.evaluation.fitting import (
    SureFit,
    TemperatureFit,
    fit_temperature,
    with_temperatures,
)
from calibration.evaluation.inference import AnsweredBatch
from calibration.evaluation.subsets import is_for_fitting
from calibration.sets.transaction import write_manifest
from models.ensemble import tempered
from models.errors import ModelSetError
from models.ledger import judge
from models.manifest import ENSEMBLE, Manifest, SureRecord, read_manifest
from models.model_set import load_model_set
from models.record import Precision
from tests.support.calibration.evaluated_sets import evaluated, two_precisions
from tests.support.scored_sets import write_scored_set
from tests.support.tiny_networks import write_pictures, write_tiny_set

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def fit_to(folder: Path, num_images: int, target: float) -> tuple[SureFit, list[bool]]:
    """Let 1,000 steps of confidence be right from 0.8 on, and every second time below."""
    fit, halves = SureFit("INT8", target), []
    confidence = np.float32(0.6) + np.float32(0.4) * np.arange(num_images) / num_images
    truth = [0 if p >= 0.8 or number % 2 else 1 for number, p in enumerate(confidence)]
    images = []
    for number, index in enumerate(truth):
        path = folder / f"{number}.png"
        path.write_bytes(str(number).encode())
        images.append(LabelledImage(path, index))
        halves.append(is_for_fitting(path))
    rows = np.stack([confidence, 1 - confidence], axis=1).astype(np.float32)
    for part in (slice(0, 400), slice(400, None)):
        batch: dict[Precision, dict[str, np.ndarray]] = {"INT8": {ENSEMBLE: rows[part]}}
        fit.add(AnsweredBatch(images[part], [], batch, []))
    fit.add(AnsweredBatch([], [], {}, []))
    return fit, halves


def test_the_lowest_bound_that_shows_the_share_judged_on_the_other_half(tmp_path: Path) -> None:
    fit, halves = fit_to(tmp_path, 2000, 0.9)
    sure = fit.result()
    # Half of the images are right from 0.8 on; with x of those below (0.5 + x/2) / (0.5 + x) are.
    # Of 600 images 0.92 must be right to show 0.9 with 95 % confidence: x is 0.095, not 0.125.
    assert sure.probability == pytest.approx(0.8 - 0.4 * 0.095, abs=0.01)
    assert sure.num_images == 2000 - sum(halves)
    assert sure.share == pytest.approx(0.595, abs=0.04)
    assert sure.right == pytest.approx(0.92, abs=0.03)
    low, high = sure.right_interval
    assert low < sure.right < high
    certain, _ = fit_to(tmp_path, 2000, 0.99)
    assert certain.result().probability == pytest.approx(0.8, abs=0.003)


def test_too_few_images_or_a_share_that_is_not_to_be_had(tmp_path: Path) -> None:
    fit, _ = fit_to(tmp_path, 150, 0.9)
    with pytest.raises(ModelSetError, match="give more images, or ask for less"):
        fit.result()
    fit = SureFit("INT8", 0.5)
    images = [LabelledImage(path, 1) for path in sorted(tmp_path.iterdir())]
    rows = np.tile(np.array([0.9, 0.1], np.float32), (len(images), 1))
    fit.add(AnsweredBatch(images, [], {"INT8": {ENSEMBLE: rows}}, []))
    with pytest.raises(ModelSetError, match=r"--sure-at 0\.5: no probability leaves 100 images"):
        fit.result()


def test_the_command_writes_it_and_calibrating_takes_it_away(tmp_path: Path) -> None:
    folder = two_precisions(tmp_path / "tiny")
    many = write_pictures(tmp_path / "many", num_per_color=90, side=16)
    before = load_model_set(str(folder)).fingerprint()
    done = evaluated(folder, "--images", many, "--sure-at", "0.9", "--no-record", "--json", "-")
    assert done.exit_code == 0, done.output
    assert read_manifest(folder).sure is None
    done = evaluated(folder, "--images", many, "--sure-at", "0.9", "--json", tmp_path / "sure.json")
    assert done.exit_code == 0, done.output
    assert "100.0% of them right" in done.output
    sure = read_manifest(folder).sure
    assert sure is not None
    assert (sure.target, sure.share, sure.right) == (0.9, 1.0, 1.0)
    facts = json.loads((tmp_path / "sure.json").read_text("utf-8"))
    assert SureRecord.model_validate({k: facts[k] for k in SureRecord.model_fields}) == sure
    model_set = load_model_set(str(folder))
    assert model_set.fingerprint() != before
    assert model_set.answer_rule.sure_from == sure.probability
    assert model_set.weighted({"sure": 1.0}).manifest.sure is None
    done = evaluated(folder, "--images", many, "--calibrate")
    assert done.exit_code == 0, done.output
    assert read_manifest(folder).sure is None


@pytest.mark.parametrize("option", [("--sure-at", "0.9"), ("--calibrate",)])
def test_what_was_fitted_is_shown_if_it_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: tuple[str, ...]
) -> None:
    folder = two_precisions(tmp_path / "tiny")
    many = write_pictures(tmp_path / "many", num_per_color=90, side=16)
    changed = read_manifest(folder).model_copy(update={"description": "another"})
    monkeypatch.setattr(command, "read_manifest", lambda _: changed)
    kept = tmp_path / "fitted.json"
    done = evaluated(folder, "--images", many, *option, "--json", kept)
    assert "was changed meanwhile" in str(done.exception)
    assert done.stdout
    assert json.loads(kept.read_text("utf-8"))["set"] == "tiny"


def test_what_it_does_not_go_with_is_refused(tmp_path: Path, pictures: Path) -> None:
    folder = two_precisions(tmp_path / "tiny")
    done = evaluated(folder, "--images", pictures, "--calibrate", "--sure-at", "0.9")
    assert "--sure-at: --calibrate fits temperatures and evaluates nothing else" in str(
        done.exception
    )
    scored = write_scored_set(tmp_path / "scored")
    done = evaluated(scored, "--images", pictures, "--sure-at", "0.9")
    assert "multi-label" in str(done.exception)
    manifest = read_manifest(scored).model_dump() | {
        "sure": {
            "probability": 0.5,
            "target": 0.9,
            "num_images": 1,
            "share": 1,
            "right": 1,
            "right_interval": (0, 1),
        }
    }
    with pytest.raises(ValueError, match="sure is of classes that exclude each other"):
        Manifest.model_validate(manifest)


NUM_CLASSES = 12


def drawn(num_images: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return probabilities (N, C) that are right, and classes drawn by them."""
    generator = np.random.default_rng(seed)
    rows = np.exp(generator.normal(0, 2, (num_images, NUM_CLASSES)))
    rows /= rows.sum(axis=1, keepdims=True)
    truth = np.array([generator.choice(NUM_CLASSES, p=row) for row in rows])
    return rows.astype(np.float32), truth


@pytest.mark.parametrize("temperature", [0.4, 1.0, 2.5])
def test_a_temperature_that_was_taken_away_is_found(temperature: float) -> None:
    rows, truth = drawn(4000, 1)
    found = fit_temperature(tempered(rows, 1 / temperature), truth)
    assert found == pytest.approx(temperature, rel=0.06)


def test_probabilities_of_zero_and_members_that_are_always_right_are_no_trouble() -> None:
    rows = np.eye(NUM_CLASSES, dtype=np.float32)
    assert fit_temperature(rows, np.arange(NUM_CLASSES)) == pytest.approx(0.2, rel=0.01)
    assert fit_temperature(rows, np.arange(NUM_CLASSES)[::-1]) == pytest.approx(20, rel=0.01)


def fit_of(manifest: Manifest, num_images: int, folder: Path, temperatures: dict[str, float]):
    """Let members say the truth at other temperatures than 1."""
    rows, truth = drawn(num_images, 2)
    fit = TemperatureFit(manifest, "INT8")
    images = []
    for number, index in enumerate(truth):
        path = folder / f"{number}.png"
        path.write_bytes(str(number).encode())
        images.append(LabelledImage(path, int(index)))
    members = {name: tempered(rows, 1 / t) for name, t in temperatures.items()}
    fit.add(AnsweredBatch(images, [], {"INT8": members}, []))
    fit.add(AnsweredBatch([], [], {}, []))
    return fit, [is_for_fitting(image.path) for image in images]


def test_each_member_then_the_average_judged_on_the_other_half(tmp_path: Path) -> None:
    manifest = read_manifest(write_tiny_set(tmp_path / "tiny"))
    fit, halves = fit_of(manifest, 3000, tmp_path, {"sure": 2.0, "unsure": 0.5})
    done = fit.result()
    assert done.temperatures["sure"] == pytest.approx(2.0, rel=0.08)
    assert done.temperatures["unsure"] == pytest.approx(0.5, rel=0.08)
    assert done.temperatures[ENSEMBLE] == pytest.approx(1.0, rel=0.08)  # of alike members
    assert (done.num_fitted, done.num_judged) == (sum(halves), 3000 - sum(halves))
    for name in ("sure", "unsure"):
        assert done.before[name].top1 == done.after[name].top1
        assert done.before[name].calibration_error > 0.1
        assert done.after[name].calibration_error < 0.04
        assert done.after[name].log_likelihood > done.before[name].log_likelihood
    assert done.after[ENSEMBLE].calibration_error < 0.04


def test_too_few_images_are_refused(tmp_path: Path) -> None:
    manifest = read_manifest(write_tiny_set(tmp_path / "tiny"))
    fit, _ = fit_of(manifest, 150, tmp_path, {"sure": 2.0, "unsure": 0.5})
    with pytest.raises(ModelSetError, match="at least 100 of each"):
        fit.result()


def test_the_command_writes_them_and_what_was_measured_before_holds_no_more(
    tmp_path: Path,
) -> None:
    folder = two_precisions(tmp_path / "tiny")
    many = write_pictures(tmp_path / "many", num_per_color=90, side=16)
    assert evaluated(folder, "--images", many).exit_code == 0
    before = load_model_set(str(folder))
    judged_before = before.manifest
    assert judge(before.manifest).status == "verified"
    kept = tmp_path / "fitted.json"
    done = evaluated(folder, "--images", many, "--calibrate", "--json", kept)
    assert done.exit_code == 0, done.output
    facts = json.loads(kept.read_text("utf-8"))
    after = load_model_set(str(folder))
    assert after.manifest.temperatures == facts["temperatures"]
    assert after.manifest.temperatures["sure"] < 1  # all are right: it may be surer
    assert (facts["num_fitted"], facts["num_judged"]) != (0, 0)
    assert facts["num_fitted"] + facts["num_judged"] == 270
    assert after.fingerprint() != before.fingerprint()
    assert load_model_set(f"{folder}@{before.fingerprint()}").manifest == judged_before
    assert after.manifest.made.by == "tandem evaluate --calibrate"
    assert judge(after.manifest).status == "unmeasured"
    again = evaluated(folder, "--images", many, "--calibrate", "--no-record", "--json", kept)
    assert again.exit_code == 0, again.output
    assert json.loads(kept.read_text("utf-8"))["temperatures"] == facts["temperatures"]
    fitted = read_manifest(folder)
    sample = evaluated(folder, "--images", many, "--calibrate", "--max-images", 240)
    assert sample.exit_code == 0, sample.output
    assert "a sample's result is shown, and not written" in sample.stderr
    assert read_manifest(folder) == fitted
    assert evaluated(folder, "--images", many).exit_code == 0
    assert judge(read_manifest(folder)).status == "verified"


def test_what_it_does_not_go_with_is_refused_temperatures(tmp_path: Path, pictures: Path) -> None:
    folder = two_precisions(tmp_path / "tiny")
    done = evaluated(folder, "--images", pictures, "--calibrate", "--subsets")
    assert "--calibrate fits temperatures and evaluates nothing else" in str(done.exception)
    done = evaluated(folder, "--images", pictures, "--calibrate")
    assert "at least 100 of each" in str(done.exception)
    assert set(read_manifest(folder).temperatures.values()) == {1.0}


def test_a_manifest_has_temperatures_that_can_be() -> None:
    with pytest.raises(ValueError, match=r"greater than or equal to 0\.2"):
        Manifest.model_validate({"temperature": 0.1})


def test_weights_of_others_take_the_averages_temperature_away(tmp_path: Path) -> None:
    folder = write_tiny_set(tmp_path / "tiny")
    manifest = read_manifest(folder)
    found = {"sure": 2.0, "unsure": 0.5, ENSEMBLE: 0.75}
    write_manifest(folder, with_temperatures(manifest, found))
    weighted = load_model_set(str(folder)).weighted({"sure": 2.0})
    assert weighted.manifest.temperatures == {"sure": 2.0, ENSEMBLE: 1.0}
