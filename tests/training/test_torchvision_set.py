"""``tandem models fetch``: torchvision's own weights entries, local files, a local server."""

import http.server
import re
import threading
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from calibration.sets.convert import build_network, torchvision_models
from calibration.sets.files import DownloadError
from calibration.sets.published_weights import (
    TorchvisionWeights,
    WeightsSource,
    fetch_set,
    read_members,
    usual_weights,
)
from models.ensemble import average
from models.errors import ModelSetError
from models.openvino_network import CompiledNetwork, RuntimeOptions
from models.record import ImageRecord
from tests.support.calibration.drawn_images import CLASSES
from tests.support.cases import cases
from tests.support.command_line import tandem
from tests.support.runtime_files import publish, torch_rows

SIZE = 64
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def old_names(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Name DenseNet's layers as the published file does: norm.1 for norm1."""
    return {re.sub(r"\.(norm|conv)([12])\.", r".\1.\2.", key): v for key, v in state.items()}


@pytest.fixture(scope="module")
def networks() -> dict[str, torch.nn.Module]:
    torch.manual_seed(5)
    return {name: build_network(name, 3).eval() for name in ("resnet50", "densenet169")}


@pytest.fixture(scope="module")
def weights_dir(networks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    for name, network in networks.items():
        state = network.state_dict()
        publish(old_names(state) if name == "densenet169" else state, folder, name)
    return folder


def entry_of(name: str, url: str, **preset: object) -> TorchvisionWeights:
    """Make an entry with torchvision's own classes."""
    from torchvision.transforms._presets import ImageClassification

    transforms = partial(ImageClassification, **preset)
    meta = {"categories": list(CLASSES)}
    entry = torchvision_models().Weights(url=url, transforms=transforms, meta=meta)
    return TorchvisionWeights(name, entry)


def entries(folder: Path, base: str) -> list[TorchvisionWeights]:
    """Make entries for the files in ``folder``."""
    preset = {"crop_size": SIZE, "resize_size": 73}
    return [
        entry_of(path.name.partition("-")[0], f"{base}/{path.name}", **preset)
        for path in sorted(folder.iterdir(), reverse=True)
    ]


@contextmanager
def served_folder(folder):
    handler = partial(QuietHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_address[1]}"
        httpd.shutdown()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def test_a_set_from_a_server_answers_as_torch_does(weights_dir, networks, tmp_path):
    heard: list[tuple[int, int | None]] = []
    source = WeightsSource(tmp_path / "cache")
    with served_folder(weights_dir) as url:
        weights = entries(weights_dir, url)
        made = fetch_set(weights, tmp_path / "sets", source, lambda *a: heard.append(a))
    assert made.problems() == []
    assert made.labels == CLASSES
    assert (made.manifest.image.input_size, made.manifest.image.resize_shorter) == (SIZE, 73)
    assert heard[-1][0] == heard[-1][1]  # the last file came whole
    pixels = np.random.default_rng(1).integers(0, 256, (2, SIZE, SIZE, 3), np.uint8)  # BGR
    options = RuntimeOptions(batch_sizes=(2,))
    rows = {
        name: CompiledNetwork(made.network_path(name, "FP16"), options).predict(pixels)
        for name in networks
    }
    expected = np.mean([torch_rows(network, pixels) for network in networks.values()], axis=0)
    np.testing.assert_allclose(average(rows, dict.fromkeys(rows, 1.0)), expected, atol=5e-3)


def test_files_fetched_elsewhere_need_no_network(weights_dir: Path, tmp_path: Path) -> None:
    """A missing file is named with its address."""
    weights = entries(weights_dir, "http://127.0.0.1:9")
    with pytest.raises(DownloadError, match=r"fetch it from http://127\.0\.0\.1:9/resnet50-"):
        fetch_set(weights, tmp_path / "sets", WeightsSource(tmp_path, tmp_path / "empty"))
    assert not (tmp_path / "sets").exists()
    made = fetch_set(weights, tmp_path / "sets", WeightsSource(tmp_path / "none", weights_dir))
    assert made.problems() == []
    assert not (tmp_path / "none").exists()


def test_tampered_weights_leave_nothing(weights_dir: Path, tmp_path: Path) -> None:
    altered = tmp_path / "altered"
    altered.mkdir()
    for path in weights_dir.iterdir():
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        (altered / path.name).write_bytes(content)
    with pytest.raises(DownloadError, match="its sha256 begins"):
        fetch_set(entries(altered, "x"), tmp_path / "sets", WeightsSource(tmp_path, altered))
    assert not (tmp_path / "sets").exists()


class Bomb:
    """What a pickle could do on loading."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("exploded"),))


def test_code_in_a_weights_file_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    evil = tmp_path / "evil"
    for name in ("resnet50", "densenet169"):
        publish(Bomb(), evil, name)
    with pytest.raises(ModelSetError, match="are no weights of this network"):
        fetch_set(entries(evil, "x"), tmp_path / "sets", WeightsSource(tmp_path, evil))
    assert not (tmp_path / "exploded").exists()
    assert list((tmp_path / "sets").iterdir()) == []


def test_an_existing_set_is_replaced_only_when_asked(weights_dir: Path, tmp_path: Path) -> None:
    weights = entries(weights_dir, "x")
    source = WeightsSource(tmp_path, weights_dir)
    fetch_set(weights, tmp_path / "sets", source)
    says = r"exists; give another folder \(--into\), or --replace it"
    with pytest.raises(ModelSetError, match=says):
        fetch_set(weights, tmp_path / "sets", source)
    assert fetch_set(weights, tmp_path / "sets", source, is_replaced=True).problems() == []
    assert [p.name for p in (tmp_path / "sets").iterdir()] == ["imagenet1k"]


def test_the_published_entries_are_what_the_code_takes_them_for() -> None:
    for version in ("IMAGENET1K_V1", "IMAGENET1K_V2"):
        weights = usual_weights(version)
        assert [len(network.labels) for network in weights] == [1000, 1000]
        assert all(network.entry.url.startswith("https://") for network in weights)
    with pytest.raises(ModelSetError, match="IMAGENET1K_V1"):
        usual_weights("V9")


def test_any_network_with_published_weights_and_its_own_preprocessing() -> None:
    names = ["efficientnet_b0", "vit_b_16=IMAGENET1K_SWAG_E2E_V1", "resnet50"]
    networks: list[Any] = [*read_members(names)]
    rules = [(network.name, network.input.image) for network in networks]
    assert [(n, r.input_size, r.resize_shorter, r.interpolation) for n, r in rules] == [
        ("efficientnet_b0", 224, 256, "bicubic"),
        ("vit_b_16", 384, 384, "bicubic"),
        ("resnet50", 224, 232, "bilinear"),
    ]
    assert networks[2].entry.name == "IMAGENET1K_V2"  # the best


@cases(
    "members, says",
    (["efficientnet_b99"], r"no network 'efficientnet_b99'; .*efficientnet_b"),
    (["fasterrcnn_resnet50_fpn"], "no network 'fasterrcnn"),
    (["vit_b_16=V9"], "no vit_b_16 weights 'V9'; there are: IMAGENET1K_V1"),
    (["resnet18", "resnet18"], "resnet18 is given twice"),
    ([f"efficientnet_b{i}" for i in range(8)] + ["resnet18"], "9 members; a set has 1 to 8"),
)
def test_members_that_cannot_be_fetched(members: list[str], says: str) -> None:
    with pytest.raises(ModelSetError, match=says):
        read_members(members)


def test_members_of_several_sizes_come_from_a_server(tmp_path: Path) -> None:
    """Each with the size, the interpolation and the normalisation of its own weights."""
    from torchvision.transforms._presets import InterpolationMode

    torch.manual_seed(6)
    modules = {name: build_network(name, 3).eval() for name in ("mobilenet_v3_small", "resnet18")}
    bicubic = {"interpolation": InterpolationMode.BICUBIC, "mean": (0, 0, 0)}
    presets: dict[str, dict[str, Any]] = {
        "mobilenet_v3_small": {"crop_size": 32, "resize_size": 40},
        "resnet18": {"crop_size": 48, **bicubic},
    }
    with served_folder(tmp_path / "weights") as url:
        files = {n: publish(m.state_dict(), tmp_path / "weights", n) for n, m in modules.items()}
        weights = [entry_of(n, f"{url}/{f.name}", **presets[n]) for n, f in files.items()]
        made = fetch_set(weights, tmp_path / "sets", WeightsSource(tmp_path / "cache"))
    first, second = made.manifest.members
    assert (first.image, made.manifest.image.input_size) == (None, 32)
    assert second.image == ImageRecord(input_size=48, resize_shorter=256, interpolation="bicubic")
    pixels = np.random.default_rng(1).integers(0, 256, (1, 48, 48, 3), np.uint8)
    network = CompiledNetwork(made.network_path("resnet18", "FP16"), RuntimeOptions())
    planes = torch.from_numpy(pixels[..., ::-1].copy()).permute(0, 3, 1, 2).float() / 255
    with torch.inference_mode():
        expected = modules["resnet18"](planes / torch.tensor((0.229, 0.224, 0.225))[:, None, None])
    np.testing.assert_allclose(network.predict(pixels), expected.softmax(1).numpy(), atol=5e-3)


def test_the_command_says_what_to_do_offline(tmp_path: Path) -> None:
    into = ["--into", tmp_path / "sets"]
    done = tandem("models", "fetch", "imagenet1k", "--weights-dir", tmp_path, *into)
    assert isinstance(done.exception, DownloadError)
    assert "resnet50-0676ba61.pth is not there; fetch it from https://" in str(done.exception)
