"""``tandem evaluate --sure-at``: the bound is that of the data, judged on others, and written."""

import json
from pathlib import Path

import numpy as np
import pytest

from calibration.commands import calibrate_run
from calibration.datasets import LabelledImage
from calibration.evaluation.inference import AnsweredBatch
from calibration.evaluation.subsets.split import is_for_fitting
from calibration.evaluation.sure import SureFit
from models.accuracy import ENSEMBLE, SureRecord
from models.errors import ModelSetError
from models.manifest import Manifest, read_manifest
from models.model_set import load_model_set
from models.record import Precision
from tests.support.calibration.evaluated_sets import evaluated, two_precisions
from tests.support.scored_sets import write_scored_set
from tests.support.tiny_networks import write_pictures

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
    monkeypatch.setattr(calibrate_run, "read_manifest", lambda _: changed)
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
