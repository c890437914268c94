"""Which of timm's networks ``tandem models fetch`` takes, by what names, with what input."""

import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from calibration.sets import published_weights
from calibration.sets.convert import timm_module
from calibration.sets.published_weights import read_members
from models.errors import ModelSetError
from models.machine import MissingExtraError
from tests.support.cases import cases

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@cases(
    "model, expected",
    ("mobilenetv3_small_100.lamb_in1k", (224, 256, "crop", "bicubic")),
    ("vit_base_patch16_384.augreg_in21k_ft_in1k", (384, 384, "crop", "bicubic")),
    ("resnet18.tv_in1k", (224, 256, "crop", "bilinear")),
    ("beitv2_base_patch16_224.in1k_ft_in22k_in1k", (224, 248, "crop", "bicubic")),
    ("efficientnet_b1.ft_in1k", (224, 256, "crop", "bicubic")),  # at the size of training
    ("eva02_base_patch14_448.mim_in22k_ft_in22k_in1k", (448, 448, "stretch", "bicubic")),
)
def test_preprocessing_is_what_timm_does(model, expected) -> None:
    """In a cropped, a stretched, a bilinear and an uncropped one, each by timm's own transform."""
    timm = timm_module()
    (network,) = read_members([f"timm:{model}"])
    image = network.input.image
    assert ((image.input_size, image.resize_shorter, image.resize, image.interpolation)) == expected
    config = timm.models.get_pretrained_cfg(model).to_dict()
    data = timm.data.resolve_data_config(pretrained_cfg=config)
    resize, crop, _, normalise = timm.data.create_transform(**data, is_training=False).transforms
    assert crop.size == (image.input_size, image.input_size)
    assert (resize.size if isinstance(resize.size, int) else resize.size[0]) == image.resize_shorter
    assert (isinstance(resize.size, int)) == (image.resize == "crop")
    assert resize.interpolation.value == image.interpolation
    for ours, theirs in (("mean", normalise.mean), ("scale", normalise.std)):
        values = getattr(network.input.normalisation, ours)
        np.testing.assert_allclose(values, 255 * theirs.numpy(), atol=1e-3)


def test_of_all_published_weights_few_want_other_preprocessing():
    """1,000 classes: cropped, stretched and squashed; the rest want borders (crop_pct over 1)."""
    timm, refused, modes = timm_module(), list[str](), set[str]()
    for name in timm.list_pretrained():
        config = timm.models.get_pretrained_cfg(name).to_dict()
        if config["num_classes"] != 1000:
            continue
        data = timm.data.resolve_data_config(pretrained_cfg=config)
        try:
            modes.add(published_weights._image(name, data).resize)
        except ModelSetError as error:
            refused.append(error.message)
    assert modes == {"crop", "stretch", "squash"}
    assert len(refused) < 10
    assert all("with a border" in message for message in refused)


@cases(
    "member, says",
    ("timm:vit_tiny_patch16_224.augreg_in21k", "has 21843 classes; imagenet1k has 1000"),
    ("timm:vit_base_patch14_dinov2.lvd142m", r"without a classifier \(0 classes\)"),
    ("timm:mobilenetv3_smal_100", "has no network 'mobilenetv3_smal_100'.* mobilenetv3_small"),
    ("timm:resnet18.nothing", "no resnet18 weights 'nothing'; there are: .*a1_in1k"),
    ("timm:coatnet_0_224", "no published weights of coatnet_0_224"),
    ("timm:gcvit_tiny.in1k", "not on the Hugging Face hub.* a pickle, which is never opened"),
    ("Big=timm:resnet18", "a member's name has small letters"),
    ("=timm:resnet18", "a member's name has small letters"),
    ("resnet18d", "no network 'resnet18d'; .*timm's is written timm:NAME"),
)
def test_members_that_cannot_be_fetched(member: str, says: str) -> None:
    with pytest.raises(ModelSetError, match=says):
        read_members([member])


@cases(
    "changed, says",
    ({"input_size": (1, 224, 224)}, "takes 1 channels of 224 x 224"),
    ({"input_size": (3, 224, 160)}, "takes 3 channels of 224 x 160"),
    ({"interpolation": "lanczos"}, "wants lanczos resizing; tandem has bilinear and bicubic"),
    ({"crop_mode": "border"}, "wants crop_mode border; tandem crops"),
    ({"crop_pct": 1.25}, "a picture resized to 179 px with a border to 224"),
)
def test_preprocessing_that_tandem_has_not(changed, says, monkeypatch):
    config = published_weights._config
    monkeypatch.setattr(published_weights, "_config", lambda *given: config(*given) | changed)
    with pytest.raises(ModelSetError, match=says):
        read_members(["timm:mobilenetv3_small_100.lamb_in1k"])


def test_one_network_twice_needs_a_name_of_its_own() -> None:
    members = ["timm:resnet18.tv_in1k", "timm:resnet18.a1_in1k"]
    with pytest.raises(ModelSetError, match=r"resnet18 is given twice.* NAME=timm:MODEL"):
        read_members(members)
    named = read_members([members[0], f"other={members[1]}"])
    assert [network.name for network in named] == ["resnet18", "other"]


def test_without_timm_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)  # import then fails as if it were not there
    with pytest.raises(MissingExtraError, match=r"needs timm, .*'tandem-serve\[timm\]'"):
        read_members(["timm:resnet18"])
    assert read_members(["resnet18"])[0].name == "resnet18"


def test_the_readme_says_how_many_are_taken() -> None:
    timm, taken = timm_module(), 0
    listed = timm.list_pretrained()
    for model in listed:
        with suppress(ModelSetError):
            taken += bool(published_weights.timm_weights(model))
    readme = Path(published_weights.__file__).parents[1] / "README.md"
    told = f" {taken:,} of the {len(listed):,} that timm {timm.__version__} lists"
    assert told in " ".join(readme.read_text("utf-8").split())
