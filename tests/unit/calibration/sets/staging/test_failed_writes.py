"""A disk that is full or fails leaves the set as it was, and the message says where."""

import errno
import os
from pathlib import Path

import pytest

from calibration.sets.transaction import change, create
from models.errors import ModelSetError
from tests.support.calibration.staged_sets import change_texts, contents, make, with_network
from tests.support.full_disk import full_disk


@pytest.mark.parametrize("free", [0, 40, 2000, 4900])
def test_a_full_disk_while_networks_are_written(folder, free):
    before = contents(folder)
    with (
        full_disk(free),
        pytest.raises(ModelSetError, match=r"cannot write .* The set is as it"),
        change(folder) as staging,
    ):
        with_network(staging, num_convolutions=2)
    assert contents(folder) == before


def test_a_full_disk_says_where_and_how_much_is_free(folder):
    with full_disk(40), pytest.raises(ModelSetError) as caught, change(folder) as staging:
        staging.text("labels.txt", "x" * 50)
    assert str(folder / ".staging.partial") in caught.value.message
    assert "File too large" in caught.value.message
    assert "MB are free there" in caught.value.message


def test_a_full_disk_while_files_are_moved_in(folder):
    """Texts and the note of what moves fit; the manifest, written last, does not."""
    before = contents(folder)
    with full_disk(2000), pytest.raises(ModelSetError, match="cannot write"):
        change_texts(folder, hint="long" * 500)
    assert contents(folder) == before


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_move_that_fails_takes_back_the_others(folder, monkeypatch, nth):
    before, calls, move = contents(folder), [], Path.replace

    def sometimes(self: Path, target: Path) -> Path:
        calls.append(target)
        if len(calls) == nth:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return move(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", sometimes)
        with pytest.raises(ModelSetError, match="Input/output error"):
            change_texts(folder)
    assert len(calls) == nth
    assert contents(folder) == before


def test_a_full_disk_while_a_set_is_made(folder):
    before = contents(folder.parent)
    for free in (0, 100, 3000):
        with (
            full_disk(free),
            pytest.raises(ModelSetError, match="cannot write"),
            create(folder, is_replaced=True) as staging,
        ):
            make(staging)
        assert contents(folder.parent) == before


def test_a_place_that_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("mine")
    with (
        pytest.raises(ModelSetError, match=r"cannot write .* Not a directory.* MB are free"),
        create(tmp_path / "file" / "sets" / "mine"),
    ):
        pass
    with (
        pytest.raises(ModelSetError, match="is no folder"),
        create(tmp_path / "file", is_replaced=True),
    ):
        pass
    assert (tmp_path / "file").read_text() == "mine"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
