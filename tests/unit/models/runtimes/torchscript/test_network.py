"""TorchScript as a runtime: rows, batches, and real archives that were doctored to do more."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.errors import ModelSetError
from models.runtimes.load import load
from models.runtimes.options import RuntimeOptions
from models.runtimes.torchscript.errors import ScriptError
from tests.support.script_files import (
    doctored,
    frozen,
    pickled_attack,
    save_script,
    scripted,
    traced,
    with_line,
    write_float_script,
    write_tiny_script,
)
from tests.support.tiny_networks import SIZE

pytestmark = pytest.mark.torch
OPTIONS = RuntimeOptions(batch_sizes=(1, 4))
SIDES = (2, SIZE, SIZE, 3)
FACTS = {"input": [None, SIZE, SIZE, 3], "num_classes": 3}


def images(count: int) -> np.ndarray:
    return np.random.default_rng(5).integers(0, 256, (count, SIZE, SIZE, 3), np.uint8)


def expected(batch: np.ndarray, gain: float = 4.0) -> np.ndarray:
    exponentials = np.exp(gain * batch.mean((1, 2)) / 255)
    return exponentials / exponentials.sum(1, keepdims=True)


@pytest.fixture(scope="module")
def script(tmp_path_factory) -> Path:
    return write_tiny_script(tmp_path_factory.mktemp("script") / "tiny.torchscript")


@pytest.fixture(scope="module")
def script_of_two(tmp_path_factory) -> Path:
    return write_tiny_script(tmp_path_factory.mktemp("script") / "two.torchscript", batch=2)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_batch_of_any_size_gives_its_own_rows(script, script_of_two, count):
    for path, fixed in ((script, None), (script_of_two, 2)):
        network = load(path, OPTIONS)
        assert network.fixed_batch == fixed
        network.warm_up()
        rows = network.predict(images(count))
        assert (rows.dtype, rows.shape) == (np.float32, (count, 3))
        np.testing.assert_allclose(rows, expected(images(count)), atol=1e-5)


def test_what_the_network_says_of_itself(script):
    network = load(script, OPTIONS)
    assert (network.runtime, network.num_threads, network.batch_sizes) == ("torchscript", 1, (1, 4))
    assert (network.input_shape, network.num_classes) == ((SIZE, SIZE, 3), 3)
    assert network.version.startswith("2.")
    network.check_fits(SIZE, 3)
    with pytest.raises(ModelSetError, match="gives 3 classes; the manifest says 16x16 and 4"):
        network.check_fits(SIZE, 4)


def net_like_real_ones() -> Any:
    """Convolutions, batch norm, dropout, loops, sizes that are computed, several outputs."""
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 8, 3, padding=1)
            self.norms = torch.nn.ModuleList([torch.nn.BatchNorm2d(8), torch.nn.BatchNorm2d(8)])
            self.drop = torch.nn.Dropout(0.5)
            self.last = torch.nn.Sequential(torch.nn.Linear(8, 3), torch.nn.Softmax(1))

        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            planes = self.conv(pixels.permute(0, 3, 1, 2).float() / 255)
            for norm in self.norms:
                planes = torch.nn.functional.relu(norm(planes), inplace=True)
            first, second = planes.chunk(2, dim=1)
            joined = torch.cat([torch.nn.functional.gelu(first, approximate="tanh"), second], 1)
            pooled = torch.nn.functional.adaptive_avg_pool2d(joined, 1)
            return self.last(self.drop(pooled.view(pooled.shape[0], -1)))

    torch.manual_seed(0)
    return Net().eval()


def answers_of(module: Any, batch: np.ndarray) -> np.ndarray:
    import torch

    with torch.inference_mode():
        return module(torch.from_numpy(batch)).numpy()


@pytest.mark.parametrize("how", ["trace", "script", "trace+freeze", "script+freeze"])
def test_a_network_like_real_ones_answers_as_the_module_does(tmp_path, how):
    module = net_like_real_ones()
    made = traced(module, SIDES) if "trace" in how else scripted(module)
    made = frozen(made) if "freeze" in how else made
    network = load(save_script(made, tmp_path / "net.torchscript", FACTS), OPTIONS)
    for count in (1, 2, 3, 4):
        expected_rows = answers_of(module, images(count))
        np.testing.assert_allclose(network.predict(images(count)), expected_rows, atol=1e-6)


def test_threads_run_it_at_the_same_time(tmp_path):
    module = net_like_real_ones()
    path = save_script(traced(module, SIDES), tmp_path / "net.torchscript", FACTS)
    network, wrong = load(path, RuntimeOptions(2, (1, 4), num_streams=2)), list[int]()

    def run(count: int) -> None:
        batch = images(count)
        rows = answers_of(module, batch)
        for _ in range(20):
            if not np.allclose(network.predict(batch), rows, atol=1e-5):
                wrong.append(count)

    threads = [threading.Thread(target=run, args=(count,)) for count in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_what_torch_cannot_optimise_runs_as_it_is(script, monkeypatch, caplog):
    import torch

    def cannot(_: Any) -> Any:
        raise RuntimeError("no oneDNN\nin this build")

    monkeypatch.setattr(torch.jit, "optimize_for_inference", cannot)
    network = load(script, OPTIONS)
    np.testing.assert_allclose(network.predict(images(2)), expected(images(2)), atol=1e-5)
    assert "only frozen: no oneDNN" in caplog.text


def test_what_fails_only_once_it_runs_optimised_is_frozen_alone(script, monkeypatch, caplog):
    """As AlexNet at 64 px, whose pooling oneDNN has not; what PyTorch had changed is not used."""
    import torch

    def broken(module: Any) -> Any:
        torch.jit.optimize_for_inference.called_with = module

        def run(_: Any) -> Any:
            raise RuntimeError("input size is not divisible by the output size")

        return run

    monkeypatch.setattr(torch.jit, "optimize_for_inference", broken)
    network = load(script, OPTIONS)
    assert network._module is not torch.jit.optimize_for_inference.called_with
    np.testing.assert_allclose(network.predict(images(2)), expected(images(2)), atol=1e-5)
    assert "only frozen: input size is not divisible" in caplog.text


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('x = torch.from_file("{path}", False, 9)', r"forward calls torch\.from_file, which"),
        ('torch.save(pixels, "{path}")', r"calls torch\.save"),
        ('pixels.save("{path}")', r"calls pixels\.save, which is no method"),
        ("x = ops.image.read_file('{path}')", r"calls ops\.image\.read_file"),
    ],
)
def test_a_real_archive_that_calls_more(script, tmp_path, line, says):
    line = line.format(path=tmp_path / "it-ran")
    path = tmp_path / "net.torchscript"
    doctored(script, path, {".py": with_line("forward", line)})
    with pytest.raises(ScriptError, match=says):
        load(path, OPTIONS)
    assert not (tmp_path / "it-ran").exists()


def test_a_module_that_runs_code_at_load(tmp_path):
    """A class of TorchScript's own with __setstate__, as PyTorch writes it."""
    import torch

    class Writes(torch.nn.Module):
        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            return pixels.float().mean((1, 2))

        @torch.jit.export
        def __getstate__(self) -> bool:
            return self.training

        @torch.jit.export
        def __setstate__(self, state: bool) -> None:
            self.training = state

    path = save_script(scripted(Writes().eval()), tmp_path / "net.torchscript", FACTS)
    with pytest.raises(ScriptError, match=r"__[gs]etstate__ runs code at load.* torch.export.save"):
        load(path, OPTIONS)


def test_a_pickle_of_something_else(script, tmp_path):
    path, attack = tmp_path / "net.torchscript", pickled_attack(tmp_path / "it-ran")
    doctored(script, path, {"/data.pkl": lambda _: attack})
    with pytest.raises(ScriptError, match=r"data\.pkl has the global '__builtin__\.getattr'"):
        load(path, OPTIONS)
    assert not (tmp_path / "it-ran").exists()


def changes_weights() -> Any:
    import torch

    class Counts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(3))

        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return pixels.float().mean((1, 2)) + self.count

    return scripted(Counts().eval())


def with_a_constant() -> Any:
    import torch

    class Adds(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("gain", torch.ones(3))

        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            return pixels.float().mean((1, 2)) + self.gain

    return frozen(scripted(Adds().eval()))


def in_training(kind: str) -> Any:
    import torch

    class Net(torch.nn.Module):
        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            planes = pixels.permute(0, 3, 1, 2).float()
            if kind == "dropout":
                return torch.dropout(planes, 0.5, True).mean((2, 3))
            norm = torch.batch_norm(planes, None, None, None, None, True, 0.1, 1e-5, False)
            return norm.mean((2, 3))

    return traced(Net(), SIDES)


def of_uninitialised_memory() -> Any:
    import torch

    class Leaks(torch.nn.Module):
        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            return torch.empty([pixels.shape[0], 3])

    return scripted(Leaks())


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (changes_weights, "changes 'count' as it runs"),
        (lambda: in_training("dropout"), r"is in training mode \(aten::dropout\): call .eval\(\)"),
        (lambda: in_training("norm"), r"is in training mode \(aten::batch_norm\)"),
        (of_uninitialised_memory, "runs aten::empty, which is not among"),
    ],
    ids=["state", "dropout", "batch norm", "memory"],
)
def test_modules_whose_answers_are_not_the_images_alone(tmp_path, made, says):
    path = save_script(made(), tmp_path / "net.torchscript", FACTS)
    with pytest.raises(ScriptError, match=says):
        load(path, OPTIONS)


def test_weights_that_are_changed_in_place(tmp_path):
    source = save_script(with_a_constant(), tmp_path / "source.torchscript", FACTS)
    path = tmp_path / "net.torchscript"
    before, after = b"CONSTANTS.c0", b"torch.add_(CONSTANTS.c0, 1)"
    load(source, OPTIONS)
    doctored(source, path, {".py": lambda code: code.replace(before, after)})
    with pytest.raises(ScriptError, match="changes its weights as it runs"):
        load(path, OPTIONS)


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"input": [None, SIZE, SIZE], "num_classes": 3}, "is damaged: extra/tandem.json"),
        ({"input": [0, SIZE, SIZE, 3], "num_classes": 3}, "is damaged: extra/tandem.json"),
        ({"input": [None, 2**40, SIZE, 3], "num_classes": 3}, "is damaged: extra/tandem.json"),
        ({"input": [None, SIZE, SIZE, 3]}, "is damaged: extra/tandem.json: 'num_classes'"),
        ([], "is damaged: extra/tandem.json"),
    ],
)
def test_facts_that_are_none(script, tmp_path, extra, says):
    import json

    path = tmp_path / "net.torchscript"
    doctored(script, path, {"tandem.json": lambda _: json.dumps(extra).encode()})
    with pytest.raises(ModelSetError, match=says):
        load(path, OPTIONS)


def test_a_float_network_is_told_from_a_member(tmp_path):
    path = write_float_script(tmp_path / "net.torchscript")
    with pytest.raises(ModelSetError, match="which folds the preprocessing in"):
        load(path, OPTIONS)


def test_other_classes_than_it_noted(script, tmp_path):
    path = tmp_path / "net.torchscript"
    doctored(script, path, {"tandem.json": lambda facts: facts.replace(b": 3}", b": 4}")})
    network = load(path, OPTIONS)
    with pytest.raises(ModelSetError, match=r"answers \(2, 3\) to 2 images"):
        network.predict(images(2))


def test_images_of_another_size(script, tmp_path):
    path = tmp_path / "net.torchscript"
    doctored(script, path, {".py": lambda code: code.replace(b"[1, 2]", b"[1, 7]")})
    with pytest.raises(ModelSetError, match=r"PyTorch cannot run .*Dimension out of range"):
        load(path, OPTIONS).predict(images(2))
