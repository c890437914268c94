"""``tandem models fetch``: torchvision's own weights entries, local files, a local server."""

import http.server
import threading
from collections.abc import Iterator
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from app.cli.main import app
from calibration.sets.download import DownloadError
from calibration.sets.networks import build_network, torchvision_models
from calibration.sets.torchvision_set import Source, fetch_set, published_weights
from calibration.training.augment import normalised
from models.ensemble import average
from models.errors import ModelSetError
from models.runtime import CompiledNetwork, RuntimeOptions
from tests.support.calibration.drawn_images import CLASSES

SIZE = 64
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def old_names(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Name DenseNet's layers as the published file does: norm.1 for norm1."""
    renamed = {}
    for key, value in state.items():
        for kind in ("norm", "conv"):
            for number in "12":
                key = key.replace(f".{kind}{number}.", f".{kind}.{number}.")
        renamed[key] = value
    return renamed


@pytest.fixture(scope="module")
def networks() -> dict[str, torch.nn.Module]:
    torch.manual_seed(5)
    return {name: build_network(name, 3).eval() for name in ("resnet50", "densenet169")}


@pytest.fixture(scope="module")
def weights_dir(
    networks: dict[str, torch.nn.Module], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Files as the publisher makes them: torch.save, the hash in the name."""
    folder = tmp_path_factory.mktemp("weights")
    for name, network in networks.items():
        state = network.state_dict()
        torch.save(old_names(state) if name == "densenet169" else state, folder / name)
        digest = sha256((folder / name).read_bytes()).hexdigest()
        (folder / name).rename(folder / f"{name}-{digest[:8]}.pth")
    return folder


def entries(folder: Path, base: str) -> dict[str, Any]:
    """Make entries with torchvision's own classes, for the files in ``folder``."""
    models = torchvision_models()
    from torchvision.transforms._presets import ImageClassification

    return {
        path.name.partition("-")[0]: models.Weights(
            url=f"{base}/{path.name}",
            transforms=partial(ImageClassification, crop_size=SIZE, resize_size=73),
            meta={"categories": list(CLASSES)},
        )
        for path in sorted(folder.iterdir(), reverse=True)
    }


@pytest.fixture
def server(weights_dir: Path) -> Iterator[str]:
    handler = partial(QuietHandler, directory=str(weights_dir))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_address[1]}"
        httpd.shutdown()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def test_a_set_from_a_server_answers_as_torch_does(
    server: str, weights_dir: Path, networks: dict[str, torch.nn.Module], tmp_path: Path
) -> None:
    heard: list[tuple[int, int | None]] = []
    source = Source(tmp_path / "cache")
    weights = entries(weights_dir, server)
    made = fetch_set(weights, tmp_path / "sets", source, lambda *a: heard.append(a))
    assert made.problems() == []
    assert made.labels == CLASSES
    assert (made.manifest.image.input_size, made.manifest.image.resize_shorter) == (SIZE, 73)
    assert heard[-1][0] == heard[-1][1]  # the last file came whole
    pixels = np.random.default_rng(1).integers(0, 256, (2, SIZE, SIZE, 3), np.uint8)  # BGR
    options = RuntimeOptions(batch_sizes=(2,))
    rows = {
        name: CompiledNetwork(made.network_path(name, "FP16"), options).infer(pixels)
        for name in networks
    }
    with torch.no_grad():
        batch = normalised(np.ascontiguousarray(pixels[..., ::-1]))
        expected = np.mean([n(batch).softmax(1).numpy() for n in networks.values()], axis=0)
    np.testing.assert_allclose(average(rows, dict.fromkeys(rows, 1.0)), expected, atol=5e-3)


def test_files_fetched_elsewhere_need_no_network(weights_dir: Path, tmp_path: Path) -> None:
    weights = entries(weights_dir, "http://127.0.0.1:9")
    made = fetch_set(weights, tmp_path / "sets", Source(tmp_path / "none", weights_dir))
    assert made.problems() == []
    assert not (tmp_path / "none").exists()


def test_a_missing_file_is_named_with_its_address(weights_dir: Path, tmp_path: Path) -> None:
    weights = entries(weights_dir, "http://127.0.0.1:9")
    with pytest.raises(DownloadError, match=r"fetch it from http://127\.0\.0\.1:9/resnet50-"):
        fetch_set(weights, tmp_path / "sets", Source(tmp_path, tmp_path / "empty"))
    assert not (tmp_path / "sets").exists()


def test_tampered_weights_leave_nothing(weights_dir: Path, tmp_path: Path) -> None:
    altered = tmp_path / "altered"
    altered.mkdir()
    for path in weights_dir.iterdir():
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        (altered / path.name).write_bytes(content)
    with pytest.raises(DownloadError, match="its sha256 begins"):
        fetch_set(entries(altered, "x"), tmp_path / "sets", Source(tmp_path, altered))
    assert not (tmp_path / "sets").exists()


class Bomb:
    """What a pickle could do on loading."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("exploded"),))


def test_code_in_a_weights_file_is_not_run(
    weights_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    evil = tmp_path / "evil"
    evil.mkdir()
    for name in ("resnet50", "densenet169"):
        torch.save(Bomb(), evil / name)
        digest = sha256((evil / name).read_bytes()).hexdigest()
        (evil / name).rename(evil / f"{name}-{digest[:8]}.pth")
    with pytest.raises(ModelSetError, match="are no weights of this network"):
        fetch_set(entries(evil, "x"), tmp_path / "sets", Source(tmp_path, evil))
    assert not (tmp_path / "exploded").exists()
    assert list((tmp_path / "sets").iterdir()) == []


def test_an_existing_set_is_replaced_only_when_asked(weights_dir: Path, tmp_path: Path) -> None:
    weights = entries(weights_dir, "x")
    source = Source(tmp_path, weights_dir)
    fetch_set(weights, tmp_path / "sets", source)
    with pytest.raises(ModelSetError, match="--replace"):
        fetch_set(weights, tmp_path / "sets", source)
    assert fetch_set(weights, tmp_path / "sets", source, is_replaced=True).problems() == []
    assert [p.name for p in (tmp_path / "sets").iterdir()] == ["imagenet1k"]


def test_the_published_entries_are_what_the_code_takes_them_for() -> None:
    for version in ("IMAGENET1K_V1", "IMAGENET1K_V2"):
        weights = published_weights(version)
        assert [len(entry.meta["categories"]) for entry in weights.values()] == [1000, 1000]
        assert all(entry.url.startswith("https://") for entry in weights.values())
    with pytest.raises(ModelSetError, match="IMAGENET1K_V1"):
        published_weights("V9")


def test_the_command_says_what_to_do_offline(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    arguments = ["models", "fetch", "imagenet1k", "--weights-dir", str(empty)]
    done = CliRunner().invoke(app, [*arguments, "--into", str(tmp_path / "sets")])
    assert isinstance(done.exception, DownloadError)
    assert "resnet50-0676ba61.pth is not there; fetch it from https://" in str(done.exception)
