"""Earlier versions of a set: what is kept, how many, and which is made the current one again."""

import errno
import os
import shlex
import shutil
from pathlib import Path

import pytest

from calibration.sets.durable import write_manifest
from calibration.sets.history import check_current
from calibration.sets.pinned import pin
from calibration.sets.transaction import change, create
from models.errors import ModelSetError
from models.manifest import read_manifest
from models.model_set import BUNDLED_DIR, ModelSet, load_model_set
from models.versions import MAX_EARLIER, earlier_folders
from tests.support.calibration.staged_sets import (
    contents,
    is_whole,
    make,
    with_network,
)

BY = "a test"


def version_of(folder: Path) -> str:
    return load_model_set(str(folder)).fingerprint()


def kept(folder: Path) -> list[str]:
    return [place.name for place in earlier_folders(folder)]


def change_network(folder: Path, gain: float) -> str:
    """Make another version of the set, and return what it is."""
    with change(folder, BY) as staging:
        staging.move_in(with_network(staging, gain))
    return version_of(folder)


def replace(folder: Path) -> str:
    with create(folder, is_replaced=True, made_by=BY) as staging:
        make(staging)
    (version,) = load_model_set(str(folder)).fingerprints.values()
    return version


def test_a_change_keeps_what_was_there_as_a_whole_set(folder):
    before, first = contents(folder), version_of(folder)
    second = change_network(folder, 3.0)
    assert second != first
    assert kept(folder) == [first]
    place = folder / ".versions" / first
    assert contents(place) == before
    assert is_whole(place)
    assert read_manifest(folder).made.by == BY
    labels = read_manifest(folder).labels.path
    assert (place / labels).samefile(folder / labels)  # shared, not copied


def test_a_change_of_words_is_no_version(folder):
    first = version_of(folder)
    with change(folder, BY) as staging:
        manifest = read_manifest(folder).model_copy(update={"description": "other words"})
        staging.move_in(manifest)
    assert version_of(folder) == first
    assert kept(folder) == []
    assert read_manifest(folder).made is None


def test_int8_beside_the_float_networks_takes_no_version_away(folder):
    replace(folder)  # float networks alone
    earlier = kept(folder)
    floats = load_model_set(str(folder)).fingerprints
    with change(folder, BY) as staging:
        manifest = read_manifest(folder)
        (member,) = manifest.members
        networks = member.networks | {"INT8": member.networks["FP16"]}
        members = (member.model_copy(update={"networks": networks}),)
        staging.move_in(manifest.model_copy(update={"members": members}))
    assert set(floats.items()) < set(load_model_set(str(folder)).fingerprints.items())
    assert kept(folder) == earlier


def test_a_replacement_keeps_what_was_there_and_its_versions(folder):
    first, second = version_of(folder), change_network(folder, 3.0)
    old = contents(folder / ".versions" / first)
    replace(folder)
    assert kept(folder) == [second, first]
    assert contents(folder / ".versions" / first) == old
    assert all(is_whole(folder / ".versions" / name) for name in (first, second))
    assert load_model_set(str(folder)).labels == ("a", "b", "c")


def test_the_oldest_goes(folder):
    versions = [version_of(folder)]
    versions += [change_network(folder, gain) for gain in range(20, 21 + MAX_EARLIER)]
    assert kept(folder) == versions[1:-1][::-1]
    assert len(kept(folder)) == MAX_EARLIER


def test_a_set_whose_manifest_is_spoilt_can_be_replaced(folder):
    (folder / "manifest.yaml").write_text("nonsense: true\n")
    replace(folder)
    assert is_whole(folder)
    assert kept(folder) == []


@pytest.mark.parametrize("way", ["change", "replace"])
def test_a_disk_without_hard_links_has_copies(folder, way, monkeypatch):
    first, before = version_of(folder), contents(folder)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    _ = change_network(folder, 3.0) if way == "change" else replace(folder)
    assert contents(folder / ".versions" / first) == before


@pytest.mark.parametrize("way", ["change", "replace"])
def test_a_disk_too_full_for_a_version_leaves_the_set_as_it_was(folder, way, monkeypatch):
    before = contents(folder)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", refuse)  # of the manifest
        with pytest.raises(ModelSetError, match="No space left on device"):
            _ = change_network(folder, 3.0) if way == "change" else replace(folder)
    left = {name for name in contents(folder) if not name.startswith(".versions")}
    assert left == set(before)
    assert kept(folder) == []
    first = version_of(folder)
    change_network(folder, 3.0)
    assert kept(folder) == [first]
    assert [path.name for path in (folder / ".versions").iterdir()] == [first]


def test_a_pinned_version_is_the_current_one_and_back(folder):
    first, before = version_of(folder), contents(folder)
    second = change_network(folder, 3.0)
    (folder / "notes").mkdir()
    (folder / "notes" / "mine.txt").write_text("my own")
    (folder / "README.md").write_text("mine")
    assert pin(load_model_set(str(folder)), first).fingerprint() == first
    assert kept(folder) == [second]
    assert {name: contents(folder)[name] for name in before} == before
    assert (folder / "notes" / "mine.txt").read_text() == "my own"
    assert (folder / "README.md").read_text() == "mine"
    assert pin(load_model_set(str(folder)), second).manifest.made.by == BY
    assert is_whole(folder)
    assert kept(folder) == [first]
    assert pin(load_model_set(str(folder)), second).fingerprint() == second
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]


def test_files_of_one_name_in_two_versions_stay_apart(folder):
    """A stem that a change gave up is free for the next one but one."""
    versions = [change_network(folder, gain) for gain in (3.0, 4.0, 5.0)]
    for version in (*versions, *versions[::-1]):
        pin(load_model_set(str(folder)), version)
        assert version_of(folder) == version
        assert is_whole(folder)
        assert all(map(is_whole, earlier_folders(folder)))


def test_a_damaged_version_is_not_pinned(folder):
    first = version_of(folder)
    second = change_network(folder, 3.0)
    (folder / ".versions" / first / "sure.bin").write_bytes(b"altered")
    before = contents(folder.parent)
    with pytest.raises(ModelSetError, match=f"version {first} cannot be served: .*altered"):
        pin(load_model_set(str(folder)), first)
    assert contents(folder.parent) == before
    assert version_of(folder) == second


def test_a_version_that_is_not_there(folder):
    with pytest.raises(ModelSetError, match=r"not 0{12}, .* tandem models history"):
        pin(load_model_set(str(folder)), "0" * 12)


def test_a_pin_that_fails_leaves_everything_as_it_was(folder, monkeypatch):
    first = version_of(folder)
    change_network(folder, 3.0)
    before, move = contents(folder.parent), Path.replace

    def failing(self: Path, target: Path) -> Path:
        if target == folder and "old" not in self.name:
            raise OSError(errno.EIO, "broken")
        return move(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", failing)
        with pytest.raises(ModelSetError, match="broken"):
            pin(load_model_set(str(folder)), first)
    assert contents(folder.parent) == before


def test_a_bundled_set_is_read_only():
    bundled = load_model_set("imagenette")
    with pytest.raises(ModelSetError, match="comes with the program and is read-only"):
        pin(bundled, bundled.fingerprint())
    assert bundled.folder.parent == BUNDLED_DIR


def test_an_earlier_version_is_not_changed(folder):
    first = version_of(folder)
    change_network(folder, 3.0)
    place = folder / ".versions" / first
    before = contents(place)
    with pytest.raises(ModelSetError, match=f"tandem models pin .*tiny@{first}"):
        change_network(place, 5.0)
    assert contents(place) == before
    check_current(folder)
    with change(place) as staging:  # as tandem evaluate adds its record
        update = {"description": "other words"}
        staging.move_in(read_manifest(place).model_copy(update=update))
    assert version_of(place) == first


def test_the_advice_to_pin_is_a_command(folder):
    place = folder.rename(folder.with_name("my set")) / ".versions" / "0123456789ab"
    with pytest.raises(ModelSetError) as refused:
        check_current(place)
    line = refused.value.message.rpartition(": ")[2]
    assert shlex.split(line) == ["tandem", "models", "pin", f"{place.parents[1]}@0123456789ab"]


def test_versions_go_by_every_precision(folder):
    manifest = read_manifest(folder)
    both = [
        m.model_copy(update={"networks": m.networks | {"FP16": m.networks["INT8"]}})
        for m in manifest.members
    ]
    write_manifest(folder, manifest.model_copy(update={"members": tuple(both)}))
    found = ModelSet(folder, read_manifest(folder))
    assert list(found.fingerprints) == ["INT8", "FP16"]
