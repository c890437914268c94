"""``models add`` of TorchScript: what is folded in, and what is refused before a set is there."""

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibration.sets.add_set import NewSet, add_set
from calibration.sets.member_options import MemberOptions
from models.ensemble import Probabilities
from models.errors import ModelSetError
from models.model_set import ModelSet
from models.runtimes.load import load
from models.runtimes.options import RuntimeOptions
from tests.support.script_files import (
    doctored,
    pickled_attack,
    save_script,
    scripted,
    traced,
    with_line,
    write_float_script,
)
from tests.support.tiny_networks import LABELS, SIZE

pytestmark = pytest.mark.torch
GAIN = 3.0
IMAGES = np.random.default_rng(5).integers(0, 256, (5, SIZE, SIZE, 3), np.uint8)
RGB: dict[str, Any] = {
    "mean": (10.0, 20.0, 30.0),
    "scale": (100.0, 110.0, 120.0),
    "color_order": "RGB",
}


def expected() -> Probabilities:
    """What the network answers: its three classes are red, green and blue here."""
    floats = (IMAGES[..., ::-1].astype(np.float64) - RGB["mean"]) / RGB["scale"]
    exponentials = np.exp(GAIN * floats.mean((1, 2)))
    return (exponentials / exponentials.sum(1, keepdims=True)).astype(np.float32)


def added(tmp_path: Path, path: Path, size: int | None = SIZE, **more: Any) -> ModelSet:
    labels = tmp_path / "labels.txt"
    labels.write_text("\n".join(LABELS), "utf-8")
    options = MemberOptions(**RGB, input_size=size)
    made = NewSet("made", [("one", path)], labels, **({"options": options} | more))
    return add_set(made, tmp_path / "sets")


def rows_of(made: ModelSet) -> Probabilities:
    network = load(made.network_path("one", "FP16"), RuntimeOptions(batch_sizes=(1, 8)))
    network.check_fits(SIZE, made.manifest.num_classes)
    return network.predict(IMAGES)


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".ts", ".torchscript"])
def test_any_of_its_suffixes(tmp_path, suffix):
    path = write_float_script(tmp_path / f"net{suffix}", GAIN)
    made = added(tmp_path, path)
    network = made.manifest.member("one").networks["FP16"]
    assert (network.runtime, network.files[0].path[-12:]) == ("torchscript", ".torchscript")
    assert made.golden is not None


@pytest.mark.parametrize("batch", [0, 2, 4], ids=["any batch", "batch 2", "batch 4"])
@pytest.mark.parametrize("how", ["trace", "script", "trace+freeze", "script+freeze"])
def test_a_script_answers_as_the_network_does(tmp_path, how, batch):
    made = added(tmp_path, write_float_script(tmp_path / "net.pt", GAIN, how, batch))
    assert made.manifest.member("one").fixed_batch == (batch or None)
    np.testing.assert_allclose(rows_of(made), expected(), atol=1e-5)


def test_what_is_written_has_neither_paths_nor_examples(tmp_path):
    made = added(tmp_path, write_float_script(tmp_path / "net.pt", GAIN))
    with zipfile.ZipFile(made.network_path("one", "FP16")) as opened:
        assert not [name for name in opened.namelist() if "debug" in name or "traced" in name]
        facts = json.loads(opened.read("archive/extra/tandem.json"))
        assert facts == {"input": [None, SIZE, SIZE, 3], "num_classes": 3}
        content = b"".join(map(opened.read, opened.namelist()))
    assert str(tmp_path).encode() not in content


def test_its_size_is_that_of_the_example_it_was_traced_with(tmp_path):
    made = added(tmp_path, write_float_script(tmp_path / "net.pt", GAIN), None)
    assert made.manifest.image.input_size == SIZE


def test_a_scripted_modules_size_is_to_be_said(tmp_path):
    path = write_float_script(tmp_path / "net.pt", GAIN, "script")
    with pytest.raises(ModelSetError, match="its size is open, so say --input-size"):
        added(tmp_path, path, None)
    assert not (tmp_path / "sets").exists()


def test_classes_are_mapped_by_their_ids(tmp_path):
    for name, ids in (("ids", "blue\ngreen"), ("own", "red\ngreen\nblue"), ("two", "blue\ngreen")):
        (tmp_path / f"{name}.txt").write_text(f"{ids}\n", "utf-8")
    new = NewSet(
        "made",
        [("one", write_float_script(tmp_path / "net.pt", GAIN))],
        tmp_path / "two.txt",
        class_ids=tmp_path / "ids.txt",
        member_class_ids={"one": tmp_path / "own.txt"},
        options=MemberOptions(**RGB),
    )
    picked = expected()[:, [2, 1]]
    rows = rows_of(add_set(new, tmp_path / "sets"))
    np.testing.assert_allclose(rows, picked / picked.sum(1, keepdims=True), atol=1e-5)


def ending(end: str) -> Any:
    """Return a module, to be scripted, that ends in something else than a row of classes."""
    import torch

    class Map(torch.nn.Module):
        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return image

    class Two(torch.nn.Module):
        def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return image.mean((2, 3)), image

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
            return image.mean((2, 3)) * float("nan")

    kinds = {kind.__name__: kind for kind in (Map, Two, Pair, Sum, Four, Larger, NotANumber)}
    return scripted(kinds[end]().eval())


@pytest.mark.parametrize(
    ("end", "says"),
    [
        ("Map", "segmentation or features are no classifiers"),
        ("Two", r"it gives Tuple\[Tensor, Tensor\]; a member has one output"),
        ("Pair", r"it has 2 inputs \(image, other\); a member has one image in"),
        ("Sum", "other rows than images"),
        ("Four", "4 classes; .*labels.txt: 3 labels. The number of classes must be the same"),
        ("Larger", "does not run on float32 images of 16 px.*is invalid for input of size"),
        ("NotANumber", "answers NaN to an image"),
    ],
)
def test_scripts_that_are_no_classifiers(tmp_path, end, says):
    path = save_script(ending(end), tmp_path / "net.pt")
    with pytest.raises(ModelSetError, match=says):
        added(tmp_path, path)
    assert not (tmp_path / "sets").exists()


def test_weights_with_nan_are_told_by_name(tmp_path):
    path = write_float_script(tmp_path / "net.pt", float("nan"))
    with pytest.raises(ModelSetError, match="the weights gain have NaN; its training failed"):
        added(tmp_path, path)


def test_a_network_in_training_mode(tmp_path):
    import torch

    class Drops(torch.nn.Module):
        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return torch.dropout(image, 0.5, True).mean((2, 3))

    made = traced(Drops(), (2, 3, SIZE, SIZE), is_float=True)
    with pytest.raises(ModelSetError, match="is in training mode"):
        added(tmp_path, save_script(made, tmp_path / "net.pt"))


def test_a_checkpoint_is_told_from_a_script(tmp_path):
    import torch

    torch.save({"weights": torch.zeros(3)}, tmp_path / "net.pt")
    (tmp_path / "old.pt").write_bytes(pickled_attack(tmp_path / "it-ran"))
    for name, says in (("net", "is a checkpoint of torch.save"), ("old", "is no TorchScript file")):
        with pytest.raises(ModelSetError, match=f"{says}.*torch.export.save"):
            added(tmp_path, tmp_path / f"{name}.pt")
    assert not (tmp_path / "it-ran").exists()
    assert not (tmp_path / "sets").exists()


def test_a_script_that_does_more_leaves_no_set(tmp_path):
    line = f"x = torch.from_file('{tmp_path / 'it-ran'}', True, 9)"
    source = write_float_script(tmp_path / "net.pt")
    path = doctored(source, tmp_path / "evil.pt", {".py": with_line("forward", line)})
    with pytest.raises(ModelSetError, match=r"calls torch\.from_file.*so the file is not loaded"):
        added(tmp_path, path)
    assert not (tmp_path / "it-ran").exists()
    assert not (tmp_path / "sets").exists()


def test_torch_stands_for_its_scripts_too(tmp_path):
    path = write_float_script(tmp_path / "net.pt", GAIN)
    made = added(tmp_path, path, runtimes={"one": "torch"})
    assert made.manifest.member("one").networks["FP16"].runtime == "torchscript"
