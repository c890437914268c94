"""A change of a set: only its own files come and go, and one command at a time."""

import errno
import os
import shutil
from pathlib import Path

import openvino as ov
import pytest

from calibration.sets.staging import MOVING_NAME
from calibration.sets.transaction import change, create
from models.errors import ModelSetError
from models.manifest import read_manifest
from tests.support.calibration.staged_sets import (
    change_texts,
    contents,
    is_whole,
    with_network,
    with_texts,
)


def test_a_change_names_only_its_own_files_and_the_old_ones_go(folder):
    old = read_manifest(folder)
    with change(folder) as staging:
        manifest = with_network(staging)
        staging.move_in(manifest)
    assert read_manifest(folder) == manifest
    assert is_whole(folder)
    gone = {"sure.xml", "sure.bin"}
    kept = {record.path for record in old.files} - gone
    added = {record.path for record in manifest.files} - kept
    assert set(contents(folder)) == kept | added | {"manifest.yaml"}
    assert {Path(name).suffix for name in added} == {".xml", ".bin", ".json"}


def test_the_copy_of_a_set_in_a_store_is_not_changed(folder, tmp_path, monkeypatch):
    """It would be taken for a damaged one, and be fetched again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    copy = tmp_path / "cache" / "tandem" / "sets" / "of-the-url" / "digest"
    shutil.copytree(folder, copy)
    with (
        pytest.raises(ModelSetError, match=r"a copy of a set in a store, .* tandem models push"),
        change(copy),
    ):
        pass
    assert contents(copy) == contents(folder)


def test_the_same_change_again_and_again_never_writes_over_what_is_named(folder):
    for gain in (3.0, 3.0, 3.0, 5.0):
        before = read_manifest(folder).members[0].networks["INT8"]
        with change(folder) as staging:
            manifest = with_network(staging, gain)
            network = manifest.members[0].networks["INT8"]
            assert not (folder / network.xml.path).exists()
            assert not (folder / network.bin.path).exists()
            staging.move_in(manifest)
        assert is_whole(folder)
        assert before.xml.path != network.xml.path
        assert before.bin.path != network.bin.path
    assert len(contents(folder)) == len(read_manifest(folder).files) + 1


def test_files_that_are_not_the_sets_stay(folder):
    with change(folder) as staging:
        staging.move_in(with_network(staging))
    name = read_manifest(folder).members[0].networks["INT8"].bin.path
    (folder / "sure.bin").write_bytes(b"my own")
    (folder / "README.md").write_bytes(b"mine")
    with change(folder) as staging:
        staging.move_in(with_network(staging))
    assert not (folder / name).exists()
    assert (folder / "sure.bin").read_bytes() == b"my own"
    assert (folder / "README.md").read_bytes() == b"mine"


@pytest.mark.parametrize("error", [ValueError("a fault"), KeyboardInterrupt(), SystemExit(1)])
@pytest.mark.parametrize("is_staged", [False, True])
def test_an_exception_leaves_the_set_as_it_was(folder, error, is_staged):
    before = contents(folder)

    def fail() -> None:
        with change(folder) as staging:
            if is_staged:
                with_network(staging)
            raise error

    with pytest.raises(type(error)):
        fail()
    assert contents(folder) == before


@pytest.mark.parametrize("suffix", [".bin", ".xml"])
def test_a_network_cut_short_in_silence_gets_no_further(folder, monkeypatch, suffix):
    before, save = contents(folder), ov.save_model

    def cut_short(model: ov.Model, path: Path, **options: bool) -> None:
        save(model, path, **options)
        written = path.with_suffix(suffix)
        os.truncate(written, written.stat().st_size // 2)

    monkeypatch.setattr(ov, "save_model", cut_short)
    with pytest.raises(ModelSetError, match="OpenVINO cannot read"), change(folder) as staging:
        staging.move_in(with_network(staging, num_convolutions=2))
    assert contents(folder) == before


def test_a_network_that_does_not_run_is_an_error_that_names_it(folder):
    before = contents(folder)
    with change(folder) as staging:
        manifest = with_network(staging)
        staged = staging.work / manifest.members[0].networks["INT8"].xml.path
        staged.write_text("<net/>")
        with pytest.raises(ModelSetError, match=r"cannot run .*sure.*\.xml"):
            staging.golden(manifest)
    assert contents(folder) == before


def test_a_note_of_moves_names_nothing_outside_the_set(folder):
    outside = folder.parent / "precious.txt"
    outside.write_text("keep me")
    work = folder / ".staging.partial"
    work.mkdir()
    record = {"path": "../precious.txt", "sha256": "0" * 64}
    (work / MOVING_NAME).write_text(f"[{record}]".replace("'", '"'))
    before = contents(folder)
    change_texts(folder)
    assert outside.read_text() == "keep me"
    assert set(before) - set(contents(folder)) >= {".staging.partial"}


def test_a_second_change_at_the_same_time_is_refused(folder):
    with change(folder) as staging:
        manifest = with_texts(staging, read_manifest(folder))
        with pytest.raises(ModelSetError, match="another command is changing"), change(folder):
            pass
        with (
            pytest.raises(ModelSetError, match="another command is changing"),
            create(folder, is_replaced=True),
        ):
            pass
        staging.move_in(manifest)  # its files were left alone
    assert is_whole(folder)
    change_texts(folder)


def test_a_blocking_call_in_a_change_is_not_taken_for_another_command(folder):
    with pytest.raises(BlockingIOError), change(folder):
        raise BlockingIOError(errno.EAGAIN, "not now")


def test_a_set_that_is_not_there_cannot_be_changed(tmp_path):
    with (
        pytest.raises(ModelSetError, match=r"cannot open .*nothing: No such file"),
        change(tmp_path / "nothing"),
    ):
        pass
    assert list(tmp_path.iterdir()) == []
