"""A teacher's answers, and the mean of two trainings."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import openvino as ov
import pytest
import torch

from calibration.sets.convert import convert_module
from calibration.sets.networks import build_network, save_tensors
from calibration.training.augment import normalised, read_folders
from calibration.training.average import average_weights
from calibration.training.recipe import Recipe
from calibration.training.teacher import Teacher
from calibration.training.trainer import Trainer
from models.errors import ModelSetError

SIZE = 64
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def network() -> torch.nn.Module:
    torch.manual_seed(3)
    made = build_network("resnet50", 3).train()
    with torch.no_grad():
        made(torch.randn(8, 3, SIZE, SIZE))
    return made.eval()


@pytest.fixture(scope="module")
def xml(network: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("teacher") / "teacher.xml"
    ov.save_model(convert_module(network, "resnet50", SIZE), path)
    return path


@pytest.mark.parametrize("size", [SIZE, 32])
def test_the_teacher_answers_as_its_network_at_any_size(
    network: torch.nn.Module, xml: Path, size: int
) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (18, size, size, 3), np.uint8)
    batch = normalised(pixels)
    with torch.no_grad():
        expected = network(batch).softmax(1)
    found = Teacher(xml).probabilities(batch)
    np.testing.assert_allclose(found.numpy(), expected.numpy(), atol=0.02)


def test_a_student_learns_the_teachers_answers_not_the_labels(
    xml: Path, training_images: Path, tmp_path: Path
) -> None:
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


def test_the_mean_of_a_network_and_itself_is_itself(
    network: torch.nn.Module, training_images: Path, tmp_path: Path
) -> None:
    save_tensors(network.state_dict(), tmp_path / "a.safetensors")
    moved = {k: v + 2 if k == "fc.bias" else v for k, v in network.state_dict().items()}
    save_tensors(moved, tmp_path / "b.safetensors")
    data = read_folders([training_images])
    mean = build_network("resnet50", 3)
    average_weights(mean, tmp_path / "a.safetensors", tmp_path / "b.safetensors", data, 32)
    torch.testing.assert_close(mean.conv1.weight, network.conv1.weight)
    torch.testing.assert_close(mean.fc.bias, network.fc.bias + 1)
    assert not torch.equal(mean.bn1.running_mean, network.bn1.running_mean)  # measured anew


def test_two_different_networks_have_no_mean(
    network: torch.nn.Module, training_images: Path, tmp_path: Path
) -> None:
    save_tensors(network.state_dict(), tmp_path / "a.safetensors")
    other = build_network("densenet169", 3).state_dict()
    save_tensors(other, tmp_path / "b.safetensors")
    data = read_folders([training_images])
    with pytest.raises(ModelSetError, match="not two trainings"):
        average_weights(
            build_network("resnet50", 3),
            tmp_path / "a.safetensors",
            tmp_path / "b.safetensors",
            data,
            32,
        )


@pytest.mark.parametrize(
    ("module", "options"),
    [("average", ["resnet50", "{0}/a", "{0}/a"]), ("unfold", ["resnet50", "--xml", "{0}/a"])],
)
def test_a_mistake_is_a_line(tmp_path: Path, module: str, options: list[str]) -> None:
    (tmp_path / "a").touch()
    command = [sys.executable, "-m", f"calibration.training.{module}"]
    command += [option.format(tmp_path) for option in options]
    command += ["--images", str(tmp_path), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("no images in ")
