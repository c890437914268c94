"""``tandem models fetch`` of timm's networks: timm's own metadata, a server like the hub."""

import os
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save

from calibration.quantization.quantize import has_attention
from calibration.sets import published_weights
from calibration.sets.convert import build_network, convert_module, timm_module, torchvision_models
from calibration.sets.files import DownloadError
from calibration.sets.published_weights import (
    TorchvisionWeights,
    WeightsSource,
    fetch_set,
    read_members,
)
from models.errors import ModelSetError
from models.model_set import ModelSet, load_model_set
from models.openvino_network import CompiledNetwork, RuntimeOptions, read_network
from models.record import ImageRecord
from tests.support.calibration.hub_server import COMMIT, HubServer
from tests.support.cases import cases
from tests.support.command_line import tandem
from tests.support.runtime_files import publish

VIT, CONVOLUTIONAL = "test_vit.r160_in1k", "test_resnet.r160_in1k"  # timm's own for tests: small
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)


def network_of(model: str) -> torch.nn.Module:
    """Return it with random weights that tell pictures apart."""
    torch.manual_seed(7)
    network: torch.nn.Module = timm_module().create_model(model).eval()
    with torch.no_grad():
        network.get_classifier().weight.normal_(std=0.5)
    return network


@pytest.fixture(scope="module")
def networks() -> dict[str, torch.nn.Module]:
    return {model: network_of(model) for model in (VIT, CONVOLUTIONAL)}


@pytest.fixture(scope="module")
def files(networks: dict[str, torch.nn.Module]) -> dict[str, bytes]:
    """What the hub has, by path."""
    return {
        f"timm/{model}/model.safetensors": save(
            {key: value.contiguous() for key, value in network.state_dict().items()}
        )
        for model, network in networks.items()
    }


def fetched(members: list[str], hub: HubServer, tmp_path: Path, **options: Any) -> ModelSet:
    source = WeightsSource(tmp_path / "cache", hub=hub.url)
    return fetch_set(read_members(members), tmp_path / "sets", source, **options)


def is_refused(says: str, files: dict[str, bytes], tmp_path: Path) -> None:
    """Fetch a set that is refused, and leaves nothing."""
    with HubServer(dict(files)) as hub, pytest.raises(ModelSetError, match=says):
        fetched([f"timm:{VIT}"], hub, tmp_path)
    assert list((tmp_path / "sets").iterdir()) == []


def test_the_command_takes_the_hub_of_the_environment(files, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    member = f"small=timm:{CONVOLUTIONAL}"
    with HubServer(dict(files)) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        done = tandem("models", "fetch", "imagenet1k", "--member", member, "--into", tmp_path)
    assert done.exit_code == 0, (done.output, done.exception)
    assert "small: FP16, 160 px" in done.output
    assert load_model_set(str(tmp_path / "imagenet1k")).problems() == []
    kept = [path.name for path in (tmp_path / "cache").rglob("*.safetensors")]
    assert kept == [f"{CONVOLUTIONAL}.safetensors"]


def test_timm_and_torchvision_in_one_set(files: dict[str, bytes], tmp_path: Path) -> None:
    """From files that were fetched elsewhere; the same classes, each its own normalisation."""
    published: Any = read_members(["squeezenet1_1"])[0]
    torch.manual_seed(8)
    file = publish(build_network("squeezenet1_1", 1000).state_dict(), tmp_path, "squeezenet")
    entry = torchvision_models().Weights(
        url=f"https://host.invalid/{file.name}",
        transforms=published.entry.transforms,
        meta={"categories": list(published.labels)},
    )
    data = files[f"timm/{VIT}/model.safetensors"]
    (tmp_path / f"{VIT}.safetensors").write_bytes(data)
    mixed = [TorchvisionWeights("squeezenet1_1", entry), *read_members([f"timm:{VIT}"])]
    made = fetch_set(mixed, tmp_path / "sets", WeightsSource(tmp_path / "none", tmp_path))
    assert made.problems() == []
    squeezenet, vit = made.manifest.members
    assert (squeezenet.image, made.manifest.image.input_size) == (None, 224)
    assert (vit.image.input_size, vit.image.interpolation) == (160, "bicubic")
    told = f"timm {VIT}, {VIT}.safetensors, sha256 {sha256(data).hexdigest()}"
    assert vit.source == f"{told}, license apache-2.0"
    assert not (tmp_path / "none").exists()


def test_a_set_from_the_hub(files, networks, tmp_path):
    heard: list[tuple[int, int | None]] = []
    with HubServer(dict(files)) as hub:
        members = [f"timm:{VIT}", f"small=timm:{CONVOLUTIONAL}"]
        made = fetched(members, hub, tmp_path, report=lambda *told: heard.append(told))
    assert made.problems() == []
    assert (len(made.labels), made.labels[0]) == (1000, "tench")
    vit, small = made.manifest.members
    assert (vit.name, small.name) == ("test_vit", "small")
    assert made.manifest.image == ImageRecord(
        input_size=160, resize_shorter=168, interpolation="bicubic"
    )
    assert vit.image is None
    assert small.image == ImageRecord(input_size=160, resize_shorter=168)
    data = files[f"timm/{VIT}/model.safetensors"]
    assert vit.source == (
        f"timm {VIT}, {hub.url}/timm/{VIT}/resolve/{COMMIT}/model.safetensors, "
        f"sha256 {sha256(data).hexdigest()}, license apache-2.0"
    )
    assert heard[-1][0] == heard[-1][1]  # the last file came whole
    pixels = np.random.default_rng(1).integers(0, 256, (2, 160, 160, 3), np.uint8)  # BGR
    for member, model, mean in ((vit, VIT, 0.5), (small, CONVOLUTIONAL, None)):
        config = timm_module().models.get_pretrained_cfg(model)
        assert mean is None or set(config.mean) == {mean}
        planes = torch.from_numpy(pixels[..., ::-1].copy()).permute(0, 3, 1, 2).float() / 255
        mean_of, std_of = (torch.tensor(v)[:, None, None] for v in (config.mean, config.std))
        with torch.inference_mode():
            expected = networks[model]((planes - mean_of) / std_of).softmax(1).numpy()
        path = made.network_path(member.name, "FP16")
        found = CompiledNetwork(path, RuntimeOptions(batch_sizes=(2,))).predict(pixels)
        np.testing.assert_allclose(found, expected, atol=0.02 * expected.max())
    assert has_attention(read_network(made.network_path("test_vit", "FP16")))
    assert not has_attention(read_network(made.network_path("small", "FP16")))


def test_a_broken_download_goes_on_and_a_whole_one_is_kept(files, tmp_path, monkeypatch):
    monkeypatch.setattr("calibration.sets.files.download.__defaults__", (lambda *_: None,) * 2)
    with HubServer(dict(files)) as hub:
        hub.breaks_after = [100_000]
        fetched([f"timm:{VIT}"], hub, tmp_path)
        ranges = [told for method, path, told in hub.requests if path.startswith("/bytes/")]
        assert ranges == [None, "bytes=100000-"]
        fetched([f"timm:{VIT}"], hub, tmp_path, is_replaced=True)
        assert [r for r in hub.requests if r[1].startswith("/bytes/")][2:] == []


def test_weights_altered_on_their_way_leave_nothing(files, tmp_path):
    with HubServer(dict(files)) as hub:
        hub.told_sha256 = "ab" * 32
        with pytest.raises(DownloadError, match="was altered on its way"):
            fetched([f"timm:{VIT}"], hub, tmp_path)
    assert not (tmp_path / "sets").exists()
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


@cases(
    "content, says",
    (lambda: b"\x80\x04not tensors", f"are no weights of {VIT}"),
    (lambda: save({"head.weight": torch.zeros(2, 2)}), f"are no weights of {VIT}"),
    (lambda: save(nan_of(VIT)), "test_vit answers no numbers"),
    ids=["a pickle", "other tensors", "no numbers"],
)
def test_what_are_no_weights_leave_nothing(content, says: str, tmp_path: Path) -> None:
    is_refused(says, {f"timm/{VIT}/model.safetensors": content()}, tmp_path)


def nan_of(model: str) -> dict[str, torch.Tensor]:
    state = network_of(model).state_dict()
    return {key: torch.full_like(value, torch.nan) for key, value in state.items()}


def test_a_conversion_that_answers_otherwise_is_refused(files, tmp_path, monkeypatch):
    convert = convert_module
    other = network_of(CONVOLUTIONAL)
    monkeypatch.setattr(published_weights, "convert_module", lambda _, *rest: convert(other, *rest))
    is_refused("does not answer as in PyTorch after conversion", files, tmp_path)


def test_a_network_that_cannot_be_converted_is_refused(files, tmp_path, monkeypatch):
    of_four_channels = torch.nn.Sequential(torch.nn.Conv2d(4, 1000, 1))
    monkeypatch.setattr(published_weights.TimmWeights, "build", lambda *_: of_four_channels)
    is_refused("test_vit cannot be converted to OpenVINO: .*Choose another", files, tmp_path)


def test_the_command_says_what_to_do_offline(tmp_path: Path, monkeypatch) -> None:
    """HF_ENDPOINT is where the hub is."""
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")
    folders = ["--weights-dir", tmp_path, "--into", tmp_path / "sets"]
    done = tandem("models", "fetch", "imagenet1k", "--member", f"timm:{VIT}", *folders)
    assert isinstance(done.exception, DownloadError)
    address = f"http://hub.invalid/timm/{VIT}/resolve/main/"
    assert f"{VIT}.safetensors is not there; fetch {address}" in str(done.exception)
