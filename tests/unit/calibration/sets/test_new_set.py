"""A set that is made or replaced appears whole or not at all."""

import errno
import shutil
from pathlib import Path

import pytest

from calibration.sets.transaction import create
from models.errors import ModelSetError
from models.manifest import read_manifest
from models.model_set import ModelSet, list_folders, load_model_set
from tests.support.calibration.staged_sets import contents, is_whole, make
from tests.support.tiny_networks import LABELS


def test_a_new_set_appears_when_it_is_whole(tmp_path):
    folder = tmp_path / "sets" / "mine"
    with create(folder) as staging:
        make(staging)
        assert not folder.exists()
        assert list_folders((folder.parent,)) == []
    assert is_whole(folder)
    assert list_folders((folder.parent,)) == [folder]
    assert [p.name for p in folder.parent.iterdir()] == ["mine"]
    assert len(contents(folder)) == len(read_manifest(folder).files) + 1
    assert ModelSet(folder, read_manifest(folder)).golden is not None


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_new_set_that_fails_is_not_there(tmp_path, is_replaced):
    def fail() -> None:
        with create(tmp_path / "mine", is_replaced=is_replaced) as staging:
            make(staging)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_other_files_is_not_replaced(tmp_path):
    (tmp_path / "photos").mkdir()
    (photo := tmp_path / "photos" / "a.jpg").touch()
    with (
        pytest.raises(ModelSetError, match="is no model set, and has files; move it away"),
        create(tmp_path / "photos", is_replaced=True),
    ):
        pass
    assert photo.exists()


def test_a_set_that_is_there_is_not_written_over(folder):
    before = contents(folder.parent)
    with (
        pytest.raises(ModelSetError, match="exists; give another name, or --replace"),
        create(folder),
    ):
        pass
    assert contents(folder.parent) == before


def test_a_set_is_replaced_as_a_whole(folder):
    with create(folder, is_replaced=True) as staging:
        make(staging)
        assert load_model_set(str(folder)).labels == LABELS
    assert load_model_set(str(folder)).labels == ("a", "b", "c")
    assert len(contents(folder)) == len(read_manifest(folder).files) + 1
    assert [p.name for p in folder.parent.iterdir()] == ["tiny"]


@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken"), KeyboardInterrupt()])
def test_a_replacement_that_fails_brings_the_old_set_back(folder, monkeypatch, error):
    before, move = contents(folder.parent), Path.replace

    def failing(self: Path, target: Path) -> Path:
        if target == folder and "old" not in self.name:
            raise error
        return move(self, target)

    def replace() -> None:
        with create(folder, is_replaced=True) as staging:
            make(staging)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", failing)
        kind = ModelSetError if isinstance(error, OSError) else KeyboardInterrupt
        with pytest.raises(kind):
            replace()
    assert contents(folder.parent) == before
    replace()
    assert is_whole(folder)


def test_a_set_that_a_killed_replacement_took_away_comes_back(folder):
    before = contents(folder)
    folder.replace(folder.with_name(".tiny.old.partial"))
    (folder.with_name(".tiny.partial") / "half").mkdir(parents=True)
    assert list_folders((folder.parent,)) == [folder]  # it is found where it is
    with pytest.raises(ModelSetError, match="exists; give another name"), create(folder):
        pass
    assert contents(folder) == before
    assert [p.name for p in folder.parent.iterdir()] == ["tiny"]


def test_what_killed_replacements_left_goes_with_the_next(folder):
    shutil.copytree(folder, folder.with_name(".tiny.old.partial"))
    shutil.copytree(folder, folder.with_name(".tiny.partial"))
    with create(folder, is_replaced=True) as staging:
        make(staging)
    assert set(contents(folder)) == {r.path for r in read_manifest(folder).files} | {
        "manifest.yaml"
    }
    assert [p.name for p in folder.parent.iterdir()] == ["tiny"]


def test_two_commands_do_not_make_the_same_set_at_once(tmp_path):
    folder = tmp_path / "mine"
    with create(folder) as staging, create(tmp_path / "yours") as other:
        make(other)
        with pytest.raises(ModelSetError, match="another command is changing"), create(folder):
            pass
        make(staging)
    assert is_whole(folder)
    assert is_whole(tmp_path / "yours")


def test_a_link_is_replaced_and_what_it_leads_to_stays(folder, tmp_path):
    before = contents(folder)
    link = tmp_path / "links" / "tiny"
    link.parent.mkdir()
    link.symlink_to(folder)
    with create(link, is_replaced=True) as staging:
        make(staging)
    assert not link.is_symlink()
    assert is_whole(link)
    assert [p.name for p in link.parent.iterdir()] == ["tiny"]
    assert contents(folder) == before
