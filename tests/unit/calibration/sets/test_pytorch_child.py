"""``models add --trust`` of real PyTorch files: what they answer once converted, and refusals."""

import zipfile
from functools import partial

import numpy as np
import pytest

from calibration.sets import files
from calibration.sets.options import MemberOptions
from tests.support import script_files
from tests.support.calibration import added_sets
from tests.support.calibration.added_sets import both, rows_of, softmax
from tests.support.cases import cases
from tests.support.runtime_files import export_module, write_float_pt2, write_tiny_pt2
from tests.support.tiny_networks import SIZE

pytestmark = pytest.mark.torch
GAIN = 3.0
close = partial(np.testing.assert_allclose, atol=1e-3)  # an IR's weights are FP16
IMAGES = np.random.default_rng(5).integers(0, 256, (5, SIZE, SIZE, 3), np.uint8)
MEAN, SCALE = (10.0, 20.0, 30.0), (100.0, 110.0, 120.0)
RGB = MemberOptions(mean=MEAN, scale=SCALE, color_order="RGB")
SIZED = RGB.model_copy(update={"input_size": SIZE})
FLOATS = (IMAGES[..., ::-1].astype(np.float64) - MEAN) / SCALE
# What networks answer: the three classes of the float one are red, green and blue here.
OF_FLOATS = softmax(GAIN * FLOATS.mean((1, 2)))
added = partial(added_sets.added, options=RGB, is_trusted=True)
refused = partial(added_sets.refused, options=RGB, is_trusted=True)
here = pytest.mark.usefixtures("in_this_process")


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convert here, where torch is imported already: seconds less than in a process of its own.

    ``test_a_network_answers_as_the_module_does``, of every kind of file and for both runtimes, has
    the processes, and test_files.py how they may end.
    """

    def run(_, task, **__):
        from calibration.sets.pytorch_child import convert

        with script_files.quiet():
            convert(task)

    monkeypatch.setattr(files, "run_apart", run)


@both
@pytest.mark.parametrize("kind", [".pt2", ".pt"])
def test_a_network_answers_as_the_module_does(tmp_path, kind, runtime):
    write = write_float_pt2 if kind == ".pt2" else script_files.write_float_script
    made = added(tmp_path, write(tmp_path / f"net{kind}", GAIN), runtime=runtime)
    record = made.manifest.member("m0")
    assert (record.networks["FP16"].runtime, record.fixed_batch) == (runtime, None)
    assert made.manifest.image.input_size == SIZE  # of what it was exported, or traced, with
    assert record.source.startswith(f"net{kind}, sha256 ")
    close(rows_of(made, IMAGES), OF_FLOATS)
    assert made.golden is not None


@pytest.mark.parametrize("how", ["script", "trace+freeze", "script+freeze"])
@pytest.mark.parametrize("batch", [0, 4], ids=["any batch", "batch 4"])
@here
def test_a_script_however_it_was_saved(tmp_path, how, batch):
    path = script_files.write_float_script(tmp_path / "net.pth", GAIN, how, batch)
    close(rows_of(added(tmp_path, path, options=SIZED), IMAGES), OF_FLOATS)


@both
@here
def test_a_batch_that_is_built_in(tmp_path, runtime):
    """OpenVINO frees it where the graph allows that; ONNX Runtime runs that many at a time."""
    made = added(tmp_path, write_float_pt2(tmp_path / "net.pt2", GAIN, 2), runtime=runtime)
    assert made.manifest.member("m0").fixed_batch == (None if runtime == "openvino" else 2)
    close(rows_of(made, IMAGES), OF_FLOATS)


@both
@pytest.mark.parametrize("suffix", [".pt2", ".torchscript"])
@here
def test_the_files_that_sets_had_for_pytorch(tmp_path, suffix, runtime):
    """They take pixels, with the preprocessing inside: what is said of it is not asked."""
    write = write_tiny_pt2 if suffix == ".pt2" else script_files.write_tiny_script
    plain, path = MemberOptions(mean=(1.0, 2.0, 3.0)), write(tmp_path / f"net{suffix}", GAIN)
    made = added(tmp_path, path, runtime=runtime, options=plain)
    close(rows_of(made, IMAGES), softmax(GAIN * IMAGES.mean((1, 2)) / 255))


@here
def test_a_scripted_modules_size_is_to_be_said(tmp_path):
    path = script_files.write_float_script(tmp_path / "net.pt", GAIN, "script")
    refused("its size is open, so say --input-size", tmp_path, path)


def ending(end):
    """Return a module that ends in something else than a row of classes."""
    import torch

    class Map(torch.nn.Module):
        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return image * 2

    class Two(torch.nn.Module):
        def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return image.mean((2, 3)), image * 2

    class Pair(torch.nn.Module):
        def forward(self, image: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            return image.mean((2, 3)) + other

    class Sum(torch.nn.Module):
        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return image.sum()

    class Four(torch.nn.Module):
        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return torch.cat([image, image], 1).mean((2, 3))[:, :4]

    class Larger(torch.nn.Module):
        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return image.view(image.shape[0], 3, 32, 32).mean((2, 3))

    class NotANumber(torch.nn.Module):
        def forward(self, image: torch.Tensor) -> torch.Tensor:
            rows = image.mean((2, 3))
            return (rows - rows) / (rows - rows)

    kinds = {kind.__name__: kind for kind in (Map, Two, Pair, Sum, Four, Larger, NotANumber)}
    return kinds[end]().eval()


@cases(
    "end, says",
    ("Map", "segmentation or features are no classifiers"),
    ("Two", r"gives Tuple\[Tensor, Tensor\]; a member has one tensor out|has 2 outputs"),
    ("Pair", r"has 2 inputs \(image, other\); a member has one image in"),
    ("Sum", "other rows than images"),
    (
        "Four",
        "4 classes; .*labels.txt: 3 labels. Its one class more is often the background.*"
        "number of classes must be the same",
    ),
    ("Larger", r"does not run on images of \[3, 16, 16\].*is invalid for input of size"),
    ("NotANumber", "answers NaN to an image"),
)
@here
def test_scripts_that_are_no_classifiers(tmp_path, end, says):
    path = script_files.save_script(script_files.scripted(ending(end)), tmp_path / "net.pt")
    assert "net.pt" in refused(says, tmp_path, path, options=SIZED)


@cases(
    "end, says",
    ("Map", "segmentation or features are no classifiers"),
    ("Two", r"has 2 outputs \(.+, .+\); a member has one image in and one row"),
    ("NotANumber", "answers NaN to an image"),
)
@here
def test_programs_that_are_no_classifiers(tmp_path, end, says):
    import torch

    export_module(ending(end), tmp_path / "net.pt2", torch.zeros(2, 3, SIZE, SIZE))
    assert "net.pt2" in refused(says, tmp_path, tmp_path / "net.pt2")


def in_training(kind, path):
    """Write a network whose layers draw at random, or normalise by the batch that they see."""
    import torch

    class Drops(torch.nn.Module):
        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return torch.dropout(image, 0.5, True).mean((2, 3))

    class Normalises(torch.nn.Module):
        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.batch_norm(image.mean((2, 3)), None, None, training=True)

    module = Drops() if kind == "dropout" else Normalises()
    if path.suffix == ".pt2":
        with script_files.quiet():
            export_module(module, path, torch.zeros(2, 3, SIZE, SIZE))
        return path
    return script_files.save_script(
        script_files.traced(module, (2, 3, SIZE, SIZE), is_float=True), path
    )


@pytest.mark.parametrize("suffix", [".pt2", ".pt"])
@pytest.mark.parametrize("kind", ["dropout", "batch norm"])
@here
def test_a_network_in_training_mode(tmp_path, kind, suffix):
    path = in_training(kind, tmp_path / f"net{suffix}")
    refused("is in training mode|does not run on images", tmp_path, path)


def test_a_file_that_is_damaged(tmp_path):
    whole = script_files.write_float_script(tmp_path / "whole.pt")
    with zipfile.ZipFile(whole) as before, zipfile.ZipFile(tmp_path / "net.pt", "w") as after:
        for name in before.namelist():
            after.writestr(name, b"def forward" if name.endswith(".py") else before.read(name))
    refused(r"net\.pt cannot be converted: ", tmp_path, tmp_path / "net.pt")


@here
def test_a_network_like_real_ones_answers_as_the_module_does(tmp_path):
    """Convolutions, batch norm, sizes that are computed, several outputs of one operator."""
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 8, 3, padding=1)
            self.norm = torch.nn.BatchNorm2d(8)
            self.last = torch.nn.Linear(8, 3)

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            first, second = torch.relu(self.norm(self.conv(image))).chunk(2, dim=1)
            joined = torch.cat([torch.nn.functional.gelu(first, approximate="tanh"), second], 1)
            pooled = torch.nn.functional.adaptive_avg_pool2d(joined, 1)
            return self.last(pooled.view(pooled.shape[0], -1))

    torch.manual_seed(0)
    module = Net().eval()
    export_module(module, tmp_path / "net.pt2", torch.zeros(2, 3, SIZE, SIZE))
    script_files.save_script(
        script_files.frozen(script_files.scripted(module)), tmp_path / "net.pt"
    )
    batch = torch.from_numpy(FLOATS.astype(np.float32)).permute(0, 3, 1, 2)
    with torch.inference_mode():
        wanted = module(batch).softmax(1).numpy()
    for name in ("net.pt2", "net.pt"):
        close(rows_of(added(tmp_path, tmp_path / name, options=SIZED), IMAGES), wanted)
