"""Earlier versions of a set: kept whole, listed, pinned, and the oldest goes."""

import errno
import json
import os
import re
import shlex
import shutil
from functools import partial
from pathlib import Path

import pytest

from calibration.sets.transaction import change, check_current, pin, write_manifest
from models.errors import ModelSetError
from models.manifest import read_manifest
from models.model_set import BUNDLED_DIR, load_model_set
from models.stores import MAX_EARLIER, earlier_folders
from tests.support.calibration.staged_sets import contents, failing, is_whole, replace, with_network
from tests.support.cases import cases
from tests.support.command_line import tandem
from tests.support.tiny_networks import with_accuracy

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


def replaced(folder: Path) -> None:
    replace(folder, BY)


def test_a_change_keeps_what_was_there_as_a_whole_set(folder):
    before, first = contents(folder), version_of(folder)
    assert change_network(folder, 3.0) != first
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
        staging.move_in(read_manifest(folder).model_copy(update={"description": "other words"}))
    assert version_of(folder) == first
    assert kept(folder) == []
    assert read_manifest(folder).made is None


def test_int8_beside_the_float_networks_takes_no_version_away(folder):
    replaced(folder)  # float networks alone
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
    replaced(folder)
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
    replaced(folder)
    assert is_whole(folder)
    assert kept(folder) == []


WAYS = pytest.mark.parametrize("make_another", [partial(change_network, gain=3.0), replaced])


@WAYS
def test_a_disk_without_hard_links_has_copies(folder, make_another):
    first, before = version_of(folder), contents(folder)
    with failing(os, "link", errno.EPERM):
        make_another(folder)
    assert contents(folder / ".versions" / first) == before


@WAYS
def test_a_disk_too_full_for_a_version_leaves_the_set_as_it_was(folder, make_another):
    before, first = contents(folder), version_of(folder)
    with (
        failing(shutil, "copyfile", errno.ENOSPC),  # of the manifest
        pytest.raises(ModelSetError, match="No space left on device"),
    ):
        make_another(folder)
    assert {name for name in contents(folder) if not name.startswith(".versions")} == set(before)
    assert kept(folder) == []
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


def test_a_pin_that_fails_leaves_everything_as_it_was(folder):
    first = version_of(folder)
    change_network(folder, 3.0)
    before = contents(folder.parent)
    with (
        failing(
            Path, "replace", errno.EIO, lambda old, new: new == folder and "old" not in old.name
        ),
        pytest.raises(ModelSetError, match="Input/output error"),
    ):
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
        staging.move_in(read_manifest(place).model_copy(update={"description": "other words"}))
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
    assert list(load_model_set(str(folder)).fingerprints) == ["INT8", "FP16"]


@pytest.fixture
def sets(tiny_set, tmp_path) -> Path:
    """A folder of sets with one, in its second version; the first was measured."""
    folder = Path(shutil.copytree(tiny_set, tmp_path / "sets" / "tiny"))
    with change(folder) as staging:
        manifest = read_manifest(folder)
        staging.move_in(with_accuracy(manifest, {"sure": 0.5, "unsure": 0.25, "ensemble": 0.75}))
    with change(folder, "tandem quantize") as staging:
        staging.move_in(with_network(staging))
    return folder.parent


def facts(sets):
    result = tandem("models", "history", "tiny", "--model-dir", sets, "--json")
    assert result.exit_code == 0
    told = json.loads(result.stdout)
    assert (told["set"], told["folder"], told["max_earlier"]) == ("tiny", str(sets / "tiny"), 5)
    return told["versions"]


def test_history_says_of_each_version_when_what_and_how_good(sets):
    current, earlier = facts(sets)
    assert current["version"] == load_model_set(str(sets / "tiny")).fingerprint()
    assert (current["current"], earlier["current"]) == (True, False)
    assert current["made"]["by"] == "tandem quantize"
    assert current["made"]["at"].endswith("Z")
    assert earlier["made"] is None
    assert current["accuracy"] == {}
    assert earlier["accuracy"] == {"top-1": {"INT8": 0.75}}
    assert earlier["fingerprints"] == {"INT8": earlier["version"]}
    table = tandem("models", "history", "tiny", "--model-dir", sets).stdout
    for text in (current["version"], earlier["version"], "tandem quantize", "top-1 0.7500 INT8"):
        assert text in table
    assert "At most 5 earlier versions are kept" in table


def test_the_history_of_a_version_is_that_of_its_set(sets):
    listed = facts(sets)
    for version in (listed[0]["version"], listed[1]["version"]):
        name = f"{sets / 'tiny'}@{version}"
        assert json.loads(tandem("models", "history", name, "--json").stdout)["versions"] == listed
        shown = tandem("models", "history", name).stdout
        assert f"tandem models pin {sets / 'tiny'}@VERSION" in shown


def test_a_version_is_pinned_and_the_other_kept(sets):
    current, earlier = facts(sets)
    result = tandem("models", "pin", f"tiny@{earlier['version']}", "--model-dir", sets)
    assert result.exit_code == 0
    assert f"is version {earlier['version']}" in result.stdout
    now, before = facts(sets)
    assert (now["version"], before["version"]) == (earlier["version"], current["version"])
    assert now["accuracy"] == earlier["accuracy"]


@cases(
    "name, says",
    ("tiny", "'tiny' names no version: write tiny@VERSION, with one of tandem models history"),
    ("tiny@0123456789ab", r"not 0123456789ab, which it does not keep .* tandem models history"),
)
def test_what_is_not_pinned(sets, name, says):
    result = tandem("models", "pin", name, "--model-dir", sets)
    assert isinstance(result.exception, ModelSetError)
    assert re.search(says, result.exception.message)


def test_other_commands_take_a_version(sets):
    current, earlier = facts(sets)
    for version in (current["version"], earlier["version"]):
        result = tandem("models", "verify", f"tiny@{version}", "--model-dir", sets)
        assert result.exit_code == 0
    result = tandem("models", "verify", "tiny@0123456789ab", "--model-dir", sets)
    assert isinstance(result.exception, ModelSetError)
    assert f"is version {current['version']}, not 0123456789ab" in result.exception.message


def test_of_a_bundled_set_there_is_one_version():
    result = tandem("models", "history", "imagenette")
    assert result.exit_code == 0
    assert load_model_set("imagenette").fingerprint() in result.stdout
    assert "comes with the program and is read-only" in result.stdout
    told = json.loads(tandem("models", "history", "imagenette", "--json").stdout)
    assert (told["max_earlier"], len(told["versions"])) == (0, 1)
