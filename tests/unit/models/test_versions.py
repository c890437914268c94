"""NAME@VERSION: a set in the version that is asked for, or none."""

import shutil
from pathlib import Path

import pytest

from app.settings import Settings
from calibration.sets.durable import write_manifest
from models.errors import ModelSetError
from models.manifest import read_manifest
from models.model_set import earlier_sets, load_model_set
from models.versions import split_version
from tests.support.command_line import tandem
from tests.support.tiny_networks import write_tiny_set


@pytest.fixture
def folder(tmp_path) -> Path:
    """A set that keeps an earlier version, as a command leaves it."""
    earlier = write_tiny_set(tmp_path / "earlier" / "tiny", gains={"old": 3.0})
    folder = write_tiny_set(tmp_path / "sets" / "tiny")
    version = load_model_set(str(earlier)).fingerprint()
    shutil.copytree(earlier, folder / ".versions" / version)
    return folder


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("tiny", ("tiny", None)),
        ("tiny@0123456789ab", ("tiny", "0123456789ab")),
        ("a@b/tiny@0123456789ab", ("a@b/tiny", "0123456789ab")),
        ("tiny@0123456789ab/", ("tiny@0123456789ab/", None)),
        ("tiny@0123456789AB", ("tiny@0123456789AB", None)),
        ("@0123456789ab", ("@0123456789ab", None)),
    ],
)
def test_a_version_is_twelve_digits_behind_the_last_at(name, parts):
    assert split_version(name) == parts


def test_the_current_and_the_earlier_version_by_name_and_by_path(folder):
    (place,) = (folder / ".versions").iterdir()
    current = load_model_set("tiny", (folder.parent,))
    for name in ("tiny", str(folder)):
        assert load_model_set(f"{name}@{current.fingerprint()}", (folder.parent,)) == current
        earlier = load_model_set(f"{name}@{place.name}", (folder.parent,))
        assert earlier.folder == place
        assert [member.name for member in earlier.manifest.members] == ["old"]


def test_another_version_is_refused_with_both(folder):
    current = load_model_set(str(folder)).fingerprint()
    with pytest.raises(ModelSetError) as caught:
        load_model_set(f"{folder}@0123456789ab")
    assert f"is version {current}, not 0123456789ab" in caught.value.message
    assert f"tandem models history {folder}" in caught.value.message
    with pytest.raises(ModelSetError, match="behind @ is a version, twelve hexadecimal digits"):
        load_model_set("tiny@newest", (folder.parent,))


def test_a_service_wants_the_version_of_its_precision(folder):
    manifest = read_manifest(folder)
    other = write_tiny_set(folder.parent / "float", gains={"sure": 1.0, "unsure": 1.5})
    members = []
    for own, floats in zip(manifest.members, read_manifest(other).members, strict=True):
        network = floats.networks["INT8"]
        for file in network.files:
            shutil.copyfile(other / file.path, folder / f"float-{file.path}")
        renamed = {
            kind: getattr(network, kind).model_copy(
                update={"path": f"float-{getattr(network, kind).path}"}
            )
            for kind in ("xml", "bin")
        }
        networks = own.networks | {"FP16": network.model_copy(update=renamed)}
        members.append(own.model_copy(update={"networks": networks}))
    write_manifest(folder, manifest.model_copy(update={"members": tuple(members)}))
    both = load_model_set(str(folder)).fingerprints
    assert len(set(both.values())) == 2
    for precision, version in both.items():
        settings = Settings(model_set=f"{folder}@{version}", precision=precision)
        assert settings.load_set().fingerprint(precision) == version
        assert load_model_set(f"{folder}@{version}").folder == folder
    with pytest.raises(
        ModelSetError, match=f"is version {both['INT8']} in INT8, not {both['FP16']}"
    ):
        Settings(model_set=f"{folder}@{both['FP16']}").load_set()


def test_an_earlier_version_that_cannot_be_read_hides_no_other(folder, caplog):
    damaged = folder / ".versions" / "0123456789ab"
    damaged.mkdir()
    (damaged / "manifest.yaml").write_text("runtime_of_tomorrow: 1\n")
    current = load_model_set(str(folder))
    assert load_model_set(f"{folder}@{current.fingerprint()}") == current
    places = {place.name for place in (folder / ".versions").iterdir()} - {damaged.name}
    (earlier,) = earlier_sets(folder)
    assert {earlier.folder.name} == places
    assert f"{damaged} is left out" in caplog.text
    assert tandem("models", "history", str(folder)).exit_code == 0
