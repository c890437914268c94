"""A few real steps of the training script: it learns, resumes exactly, and writes what it says."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import openvino as ov
import pytest
import torch
import typer
from safetensors.torch import load_file
from typer.testing import CliRunner

from calibration.sets.convert import convert_module
from calibration.training.train import (
    Recipe,
    Teacher,
    Trainer,
    mix,
    normalised,
    parse_sizes,
    random_crop,
    read_folders,
    train,
)
from models.errors import ModelSetError

SIZE = 64
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
RECIPE = Recipe(sizes=((2, 32),), batch_size=12, warmup_epochs=0.5)


def run(*arguments: str) -> str:
    app = typer.Typer()
    app.command()(train)
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_mistake_is_a_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "calibration.training.train", "resnet50"]
    command += ["--images", str(tmp_path), "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "")
    assert done.stdout.startswith("no images in ")
    assert not (tmp_path / "run").exists()


def test_the_script_trains_and_resumes(training_images: Path, tmp_path: Path) -> None:
    common = ["resnet50", "--images", str(training_images), "--run-dir", str(tmp_path)]
    run(*common, "--sizes", "1x32")
    assert "resumed after epoch 1 of 2" in run(*common, "--sizes", "2x32")
    lines = [json.loads(line) for line in (tmp_path / "resnet50.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2]
    assert all(np.isfinite(line["loss"]) for line in lines)
    weights = load_file(tmp_path / "resnet50.safetensors")
    assert {v.dtype for v in weights.values()} == {torch.float16, torch.int64}
    assert not list(tmp_path.glob("*.partial"))


def test_resuming_continues_exactly_where_the_run_was(training_images, tmp_path):
    data = read_folders([training_images])
    straight = Trainer("resnet50", len(data.classes), RECIPE, tmp_path)
    first = list(straight.run_epoch(data))
    straight.save()
    resumed = Trainer("resnet50", len(data.classes), RECIPE, tmp_path)
    resumed.resume()
    assert resumed.epoch == 1
    second = list(straight.run_epoch(data))
    again = list(resumed.run_epoch(data))
    assert again == pytest.approx(second, rel=1e-3)  # bf16 sums in another order
    assert again != pytest.approx(first, rel=1e-3)
    ours, theirs = straight.average.state_dict(), resumed.average.state_dict()
    assert all(torch.allclose(ours[key], theirs[key], rtol=0.05, atol=1e-3) for key in ours)


def test_training_learns_to_tell_colours_apart(training_images: Path, tmp_path: Path) -> None:
    recipe = Recipe(sizes=((12, 32),), batch_size=12, peak_rate=2e-4, warmup_epochs=1)
    data = read_folders([training_images])
    trainer = Trainer("resnet50", len(data.classes), recipe, tmp_path)
    losses = [np.mean(list(trainer.run_epoch(data))) for _ in range(recipe.num_epochs)]
    assert np.mean(losses[-2:]) < 0.9 * losses[0]


def test_starting_from_weights_of_another_network_is_refused(training_images, tmp_path):
    Trainer("resnet50", 3, RECIPE, tmp_path).save()
    other = Trainer("densenet169", 3, RECIPE, tmp_path)
    with pytest.raises(ModelSetError, match="does not fit this network"):
        other.start_from(tmp_path / "resnet50.safetensors")


def test_mixing_keeps_targets_probabilities() -> None:
    rng = np.random.default_rng(0)
    batch, targets = torch.rand(8, 3, 16, 16), torch.eye(4)[torch.arange(8) % 4]
    kinds = set()
    for _ in range(40):
        mixed, mixed_targets = mix(batch, targets, rng)
        assert torch.allclose(mixed_targets.sum(1), torch.ones(8), atol=1e-5)
        kinds.add(torch.equal(mixed, batch))
    assert kinds == {True, False}


@pytest.mark.parametrize("shape", [(40, 60, 3), (200, 30, 3), (16, 16, 3)])
def test_random_crops_have_the_size_asked_for(shape: tuple[int, int, int]) -> None:
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, shape, np.uint8)
    for _ in range(20):
        crop = random_crop(image, 32, rng, 0.3)
        assert crop.shape == (32, 32, 3)
        assert crop.dtype == np.uint8


def test_the_schedule_is_a_trapezoid_over_growing_sizes() -> None:
    recipe = Recipe(sizes=parse_sizes("6x96,4x128"), warmup_epochs=1, decay_fraction=0.5)
    assert [recipe.size_at(e) for e in (0, 5, 6, 9)] == [96, 96, 128, 128]
    assert recipe.rate_at(0.05) < recipe.rate_at(0.1) == recipe.rate_at(0.5) == recipe.peak_rate
    assert recipe.rate_at(0.75) == pytest.approx(recipe.peak_rate / 2)
    assert recipe.rate_at(1.0) == pytest.approx(recipe.peak_rate / 100)
    with pytest.raises(ModelSetError, match="40x96,10x128"):
        parse_sizes("many")


@pytest.fixture(scope="module")
def xml(network: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("teacher") / "teacher.xml"
    ov.save_model(convert_module(network, "resnet50", SIZE), path)
    return path


@pytest.mark.parametrize("size", [SIZE, 32])
def test_the_teacher_answers_as_its_network_at_any_size(network, xml: Path, size: int) -> None:
    batch = normalised(np.random.default_rng(1).integers(0, 256, (18, size, size, 3), np.uint8))
    with torch.no_grad():
        expected = network(batch).softmax(1)
    np.testing.assert_allclose(Teacher(xml).probabilities(batch), expected, atol=0.02)


def test_a_student_learns_the_teachers_answers_not_the_labels(xml, training_images, tmp_path):
    data = read_folders([training_images])
    recipe = Recipe(sizes=((1, 32),), batch_size=12)
    seen: list[torch.Tensor] = []

    class Remembering(Teacher):
        def probabilities(self, batch: torch.Tensor) -> torch.Tensor:
            seen.append(super().probabilities(batch))
            return seen[-1]

    losses = {}
    for name, teacher in (("labels", None), ("teacher", Remembering(xml))):
        trainer = Trainer("resnet50", 3, recipe, tmp_path / name, teacher)
        losses[name] = next(iter(trainer.run_epoch(data)))
    assert seen[0].shape == (12, 3)
    assert losses["teacher"] != losses["labels"]  # the same first step but for the targets
