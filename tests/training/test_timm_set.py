"""``tandem models fetch`` of timm's networks: timm's own metadata, a server like the hub."""

import os
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save
from typer.testing import CliRunner

from app.cli.main import app
from calibration.quantization.quantize import has_attention
from calibration.sets.download import DownloadError
from calibration.sets.networks import build_network, timm_module, torchvision_models
from calibration.sets.published import fetched_set, timm_weights
from calibration.sets.published.fetched_set import fetch_set
from calibration.sets.published.interface import Source
from calibration.sets.published.members import read_members
from calibration.sets.published.torchvision_weights import TorchvisionWeights
from models.errors import ModelSetError
from models.extras import MissingExtraError
from models.image_record import ImageRecord
from models.model_set import ModelSet, load_model_set
from models.runtime import CompiledNetwork, RuntimeOptions, read_network
from tests.support.calibration.hub_server import COMMIT, HubServer

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
    source = Source(tmp_path / "cache", hub=hub.url)
    return fetch_set(read_members(members), tmp_path / "sets", source, **options)


def test_the_command_takes_the_hub_of_the_environment(
    files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    arguments = ["models", "fetch", "imagenet1k", "--member", f"small=timm:{CONVOLUTIONAL}"]
    with HubServer(dict(files)) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        done = CliRunner().invoke(app, [*arguments, "--into", str(tmp_path)])
    assert done.exit_code == 0, (done.output, done.exception)
    assert "small: FP16, 160 px" in done.output
    assert load_model_set(str(tmp_path / "imagenet1k")).problems() == []
    assert [p.name for p in (tmp_path / "cache").rglob("*.safetensors")] == [
        f"{CONVOLUTIONAL}.safetensors"
    ]


def test_timm_and_torchvision_in_one_set(files: dict[str, bytes], tmp_path: Path) -> None:
    """From files that were fetched elsewhere; the same classes, each its own normalisation."""
    published = read_members(["squeezenet1_1"])[0]
    torch.manual_seed(8)
    torch.save(build_network("squeezenet1_1", 1000).state_dict(), tmp_path / "weights")
    digest = sha256((tmp_path / "weights").read_bytes()).hexdigest()[:8]
    file = (tmp_path / "weights").rename(tmp_path / f"squeezenet-{digest}.pth")
    entry = torchvision_models().Weights(
        url=f"https://host.invalid/{file.name}",
        transforms=published.entry.transforms,
        meta={"categories": list(published.labels)},
    )
    data = files[f"timm/{VIT}/model.safetensors"]
    (tmp_path / f"{VIT}.safetensors").write_bytes(data)
    mixed = [TorchvisionWeights("squeezenet1_1", entry), *read_members([f"timm:{VIT}"])]
    made = fetch_set(mixed, tmp_path / "sets", Source(tmp_path / "none", tmp_path))
    assert made.problems() == []
    squeezenet, vit = made.manifest.members
    assert (squeezenet.image, made.manifest.image.input_size) == (None, 224)
    assert vit.image is not None
    assert (vit.image.input_size, vit.image.interpolation) == (160, "bicubic")
    told = f"timm {VIT}, {VIT}.safetensors, sha256 {sha256(data).hexdigest()}"
    assert vit.source == told
    assert not (tmp_path / "none").exists()


def test_a_set_from_the_hub(
    files: dict[str, bytes], networks: dict[str, torch.nn.Module], tmp_path: Path
) -> None:
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
        f"sha256 {sha256(data).hexdigest()}"
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
        found = CompiledNetwork(path, RuntimeOptions(batch_sizes=(2,))).infer(pixels)
        np.testing.assert_allclose(found, expected, atol=0.02 * expected.max())
    assert has_attention(read_network(made.network_path("test_vit", "FP16")))
    assert not has_attention(read_network(made.network_path("small", "FP16")))


def test_a_broken_download_goes_on_and_a_whole_one_is_kept(
    files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("calibration.sets.download.download.__defaults__", (lambda *_: None,) * 2)
    with HubServer(dict(files)) as hub:
        hub.breaks_after = [100_000]
        fetched([f"timm:{VIT}"], hub, tmp_path)
        ranges = [told for method, path, told in hub.requests if path.startswith("/bytes/")]
        assert ranges == [None, "bytes=100000-"]
        fetched([f"timm:{VIT}"], hub, tmp_path, is_replaced=True)
        assert [r for r in hub.requests if r[1].startswith("/bytes/")][2:] == []


def test_weights_altered_on_their_way_leave_nothing(
    files: dict[str, bytes], tmp_path: Path
) -> None:
    with HubServer(dict(files)) as hub:
        hub.told_sha256 = "ab" * 32
        with pytest.raises(DownloadError, match="was altered on its way"):
            fetched([f"timm:{VIT}"], hub, tmp_path)
    assert not (tmp_path / "sets").exists()
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\x80\x04not tensors", f"are no weights of {VIT}"),
        (save({"head.weight": torch.zeros(2, 2)}), f"are no weights of {VIT}"),
    ],
    ids=["a pickle", "other tensors"],
)
def test_what_are_no_weights_leave_nothing(content: bytes, says: str, tmp_path: Path) -> None:
    with (
        HubServer({f"timm/{VIT}/model.safetensors": content}) as hub,
        pytest.raises(ModelSetError, match=says),
    ):
        fetched([f"timm:{VIT}"], hub, tmp_path)
    assert list((tmp_path / "sets").iterdir()) == []


def test_weights_that_are_not_numbers_are_refused(tmp_path: Path) -> None:
    state = {key: torch.full_like(v, torch.nan) for key, v in network_of(VIT).state_dict().items()}
    with (
        HubServer({f"timm/{VIT}/model.safetensors": save(state)}) as hub,
        pytest.raises(ModelSetError, match="test_vit answers no numbers"),
    ):
        fetched([f"timm:{VIT}"], hub, tmp_path)


def test_a_conversion_that_answers_otherwise_is_refused(
    files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert = fetched_set.convert_module
    other = network_of(CONVOLUTIONAL)
    monkeypatch.setattr(fetched_set, "convert_module", lambda _, *rest: convert(other, *rest))
    with (
        HubServer(dict(files)) as hub,
        pytest.raises(ModelSetError, match="does not answer as in PyTorch after conversion"),
    ):
        fetched([f"timm:{VIT}"], hub, tmp_path)
    assert list((tmp_path / "sets").iterdir()) == []


def test_a_network_that_cannot_be_converted_is_refused(
    files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*_: object) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Conv2d(4, 1000, 1))  # of four channels

    monkeypatch.setattr(timm_weights.TimmWeights, "build", build)
    says = "test_vit cannot be converted to OpenVINO: .*Choose another"
    with HubServer(dict(files)) as hub, pytest.raises(ModelSetError, match=says):
        fetched([f"timm:{VIT}"], hub, tmp_path)
    assert list((tmp_path / "sets").iterdir()) == []


def test_the_command_says_what_to_do_offline(
    files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HF_ENDPOINT is where the hub is."""
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")
    arguments = ["models", "fetch", "imagenet1k", "--member", f"timm:{VIT}"]
    arguments += ["--weights-dir", str(tmp_path), "--into", str(tmp_path / "sets")]
    done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, DownloadError)
    assert f"{VIT}.safetensors is not there; fetch http://hub.invalid/timm/{VIT}/resolve/main/" in (
        str(done.exception)
    )


def test_preprocessing_is_what_timm_does() -> None:
    """In a cropped, a stretched, a bilinear and an uncropped one, each by timm's own transform."""
    named = {
        "mobilenetv3_small_100.lamb_in1k": (224, 256, "crop", "bicubic"),
        "vit_base_patch16_384.augreg_in21k_ft_in1k": (384, 384, "crop", "bicubic"),
        "resnet18.tv_in1k": (224, 256, "crop", "bilinear"),
        "beitv2_base_patch16_224.in1k_ft_in22k_in1k": (224, 248, "crop", "bicubic"),
        "efficientnet_b1.ft_in1k": (224, 256, "crop", "bicubic"),  # at the size of training
        "eva02_base_patch14_448.mim_in22k_ft_in22k_in1k": (448, 448, "stretch", "bicubic"),
    }
    timm = timm_module()
    for model, expected in named.items():
        (network,) = read_members([f"timm:{model}"])
        image = network.input.image
        found = (image.input_size, image.resize_shorter, image.resize, image.interpolation)
        assert found == expected, model
        config = timm.models.get_pretrained_cfg(model).to_dict()
        transform = timm.data.create_transform(
            **timm.data.resolve_data_config(pretrained_cfg=config), is_training=False
        )
        resize, crop, _, normalise = transform.transforms
        assert crop.size == (image.input_size, image.input_size)
        by_timm = resize.size if isinstance(resize.size, int) else resize.size[0]
        assert by_timm == image.resize_shorter
        assert (isinstance(resize.size, int)) == (image.resize == "crop")
        assert resize.interpolation.value == image.interpolation
        for ours, theirs in (("mean", normalise.mean), ("scale", normalise.std)):
            np.testing.assert_allclose(
                getattr(network.input.normalisation, ours), 255 * theirs.numpy(), atol=1e-3
            )


@pytest.mark.parametrize(
    ("member", "says"),
    [
        ("timm:vit_tiny_patch16_224.augreg_in21k", "has 21843 classes; imagenet1k has 1000"),
        ("timm:vit_base_patch14_dinov2.lvd142m", r"without a classifier \(0 classes\)"),
        ("timm:mobilenetv3_smal_100", "has no network 'mobilenetv3_smal_100'.* mobilenetv3_small"),
        ("timm:resnet18.nothing", "no resnet18 weights 'nothing'; there are: .*a1_in1k"),
        ("timm:coatnet_0_224", "no published weights of coatnet_0_224"),
        ("timm:gcvit_tiny.in1k", "not on the Hugging Face hub.* a pickle, which is never opened"),
        ("timm:dm_nfnet_f0.dm_in1k", "crop_mode squash with crop_pct 0.9; tandem"),
        ("Big=timm:resnet18", "a member's name has small letters"),
        ("=timm:resnet18", "a member's name has small letters"),
        ("resnet18d", "no network 'resnet18d'; .*timm's is written timm:NAME"),
    ],
)
def test_members_that_cannot_be_fetched(member: str, says: str) -> None:
    with pytest.raises(ModelSetError, match=says):
        read_members([member])


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"input_size": (1, 224, 224)}, "takes 1 channels of 224 x 224"),
        ({"input_size": (3, 224, 160)}, "takes 3 channels of 224 x 160"),
        ({"interpolation": "lanczos"}, "wants lanczos resizing; tandem has bilinear and bicubic"),
        ({"crop_mode": "border"}, "crop_mode border with crop_pct 0.875"),
        ({"crop_pct": 1.25}, "a picture resized to 179 px with a border to 224"),
    ],
)
def test_preprocessing_that_tandem_has_not(
    changed: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = timm_weights._config
    monkeypatch.setattr(timm_weights, "_config", lambda *given: config(*given) | changed)
    with pytest.raises(ModelSetError, match=says):
        read_members(["timm:mobilenetv3_small_100.lamb_in1k"])


def test_one_network_twice_needs_a_name_of_its_own() -> None:
    members = ["timm:resnet18.tv_in1k", "timm:resnet18.a1_in1k"]
    with pytest.raises(ModelSetError, match=r"resnet18 is given twice.* NAME=timm:MODEL"):
        read_members(members)
    assert [n.name for n in read_members([members[0], f"other={members[1]}"])] == [
        "resnet18",
        "other",
    ]


def test_without_timm_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)  # import then fails as if it were not there
    with pytest.raises(MissingExtraError, match=r"needs timm, .*'tandem\[timm\]'"):
        read_members(["timm:resnet18"])
    assert read_members(["resnet18"])[0].name == "resnet18"
