"""A set that is made or replaced appears whole or not at all."""

import errno
import shutil
from pathlib import Path

import pytest

from calibration.sets.transaction import create
from models.errors import ModelSetError
from models.manifest import read_manifest
from models.model_set import list_folders, load_model_set
from tests.support.calibration.staged_sets import (
    contents,
    failing,
    is_whole,
    make,
    refused,
    replace,
)
from tests.support.tiny_networks import LABELS


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def test_a_new_set_appears_when_it_is_whole(tmp_path):
    folder = tmp_path / "sets" / "mine"
    with create(folder) as staging:
        make(staging)
        assert not folder.exists()
        assert list_folders((folder.parent,)) == []
    assert is_whole(folder)
    assert list_folders((folder.parent,)) == [folder]
    assert names_in(folder.parent) == ["mine"]
    assert len(contents(folder)) == len(read_manifest(folder).files) + 1
    assert load_model_set(str(folder)).golden is not None


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_new_set_that_fails_is_not_there(tmp_path, is_replaced):
    def fail() -> None:
        with create(tmp_path / "mine", is_replaced=is_replaced) as staging:
            make(staging)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert names_in(tmp_path) == []


def test_what_is_there_is_not_written_over(folder, tmp_path):
    (photos := tmp_path / "photos").mkdir()
    (photos / "a.jpg").touch()
    before = contents(tmp_path)
    refused("is no model set, and has files; move it away", create(photos, is_replaced=True))
    refused("exists; give another name, or --replace", create(folder))
    assert contents(tmp_path) == before


def test_a_set_is_replaced_as_a_whole(folder):
    with create(folder, is_replaced=True) as staging:
        make(staging)
        assert load_model_set(str(folder)).labels == LABELS
    assert load_model_set(str(folder)).labels == ("a", "b", "c")
    assert len(contents(folder)) == len(read_manifest(folder).files) + 1
    assert names_in(folder.parent) == ["tiny"]


@pytest.mark.parametrize("error", [None, KeyboardInterrupt()])
def test_a_replacement_that_fails_brings_the_old_set_back(folder, error):
    before = contents(folder.parent)

    def is_new(source: Path, target: Path) -> bool:
        is_it = target == folder and "old" not in source.name
        if is_it and error:
            raise error
        return is_it

    with (
        failing(Path, "replace", errno.EIO, is_new),
        pytest.raises(KeyboardInterrupt if error else ModelSetError),
    ):
        replace(folder)
    assert contents(folder.parent) == before
    replace(folder)
    assert is_whole(folder)


def test_a_set_that_a_killed_replacement_took_away_comes_back(folder):
    before = contents(folder)
    folder.replace(folder.with_name(".tiny.old.partial"))
    (folder.with_name(".tiny.partial") / "half").mkdir(parents=True)
    assert list_folders((folder.parent,)) == [folder]  # it is found where it is
    refused("exists; give another name", create(folder))
    assert contents(folder) == before
    assert names_in(folder.parent) == ["tiny"]


def test_what_killed_replacements_left_goes_with_the_next(folder):
    for left in (".tiny.old.partial", ".tiny.partial"):
        shutil.copytree(folder, folder.with_name(left))
    replace(folder)
    files = {record.path for record in read_manifest(folder).files}
    assert set(contents(folder)) == files | {"manifest.yaml"}
    assert names_in(folder.parent) == ["tiny"]


def test_two_commands_do_not_make_the_same_set_at_once(tmp_path):
    folder, yours = tmp_path / "mine", tmp_path / "yours"
    with create(folder) as staging, create(yours) as other:
        make(other)
        refused("another command is changing", create(folder))
        make(staging)
    assert is_whole(folder)
    assert is_whole(yours)


def test_a_link_is_replaced_and_what_it_leads_to_stays(folder, tmp_path):
    before, link = contents(folder), tmp_path / "links" / "tiny"
    link.parent.mkdir()
    link.symlink_to(folder)
    replace(link)
    assert not link.is_symlink()
    assert is_whole(link)
    assert names_in(link.parent) == ["tiny"]
    assert contents(folder) == before
