"""The mean of two trainings."""

import subprocess
import sys

import pytest
import torch

from calibration.sets.convert import build_network, save_tensors
from calibration.training.average import average_weights
from calibration.training.train import read_folders
from models.errors import ModelSetError


def test_the_mean_of_a_network_and_itself_is_itself(network, training_images, tmp_path):
    save_tensors(network.state_dict(), tmp_path / "a.safetensors")
    moved = {k: v + 2 if k == "fc.bias" else v for k, v in network.state_dict().items()}
    save_tensors(moved, tmp_path / "b.safetensors")
    data = read_folders([training_images])
    mean = build_network("resnet50", 3)
    average_weights(mean, tmp_path / "a.safetensors", tmp_path / "b.safetensors", data, 32)
    torch.testing.assert_close(mean.conv1.weight, network.conv1.weight)
    torch.testing.assert_close(mean.fc.bias, network.fc.bias + 1)
    assert not torch.equal(mean.bn1.running_mean, network.bn1.running_mean)  # measured anew


def test_two_different_networks_have_no_mean(network, training_images, tmp_path):
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_tensors(network.state_dict(), a)
    save_tensors(build_network("densenet169", 3).state_dict(), b)
    data = read_folders([training_images])
    with pytest.raises(ModelSetError, match="not two trainings"):
        average_weights(build_network("resnet50", 3), a, b, data, 32)


def test_a_mistake_is_a_line(tmp_path):
    (tmp_path / "a").touch()
    module, file = ["-m", "calibration.training.average", "resnet50"], str(tmp_path / "a")
    folders = ["--images", str(tmp_path), "--out", str(tmp_path / "out")]
    command = [sys.executable, *module, file, file, *folders]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("no images in ")
