"""A change of a set is whole or not at all, and what there was before is kept."""

import errno
import os
import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import openvino as ov
import pytest

from calibration.sets.transaction import MOVING_NAME, change, create, flush, write_manifest
from models.errors import ModelSetError
from models.manifest import read_manifest
from tests.support.calibration.staged_sets import (
    change_texts,
    contents,
    failing,
    is_whole,
    refused,
    replace,
    with_network,
    with_texts,
)
from tests.support.full_disk import full_disk

STAGING = r"tiny/\.staging\.partial"
Step = tuple[str, str]  # what was done, to which path below the set's parent


def test_a_change_names_only_its_own_files_and_the_old_ones_go(folder):
    old = read_manifest(folder)
    with change(folder) as staging:
        manifest = with_network(staging)
        staging.move_in(manifest)
    assert read_manifest(folder) == manifest
    assert is_whole(folder)
    kept = {record.path for record in old.files} - {"sure.xml", "sure.bin"}
    added = {record.path for record in manifest.files} - kept
    assert set(contents(folder)) == kept | added | {"manifest.yaml"}
    assert {Path(name).suffix for name in added} == {".xml", ".bin", ".json"}


def test_the_copy_of_a_set_in_a_store_is_not_changed(folder, tmp_path, monkeypatch):
    """It would be taken for a damaged one, and be fetched again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    copy = tmp_path / "cache" / "tandem" / "sets" / "of-the-url" / "digest"
    shutil.copytree(folder, copy)
    refused(r"a copy of a set in a store, .* tandem models push", change(copy))
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
        (staging.work / manifest.members[0].networks["INT8"].xml.path).write_text("<net/>")
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
        refused("another command is changing", change(folder))
        refused("another command is changing", create(folder, is_replaced=True))
        staging.move_in(manifest)  # its files were left alone
    assert is_whole(folder)
    change_texts(folder)


def test_a_blocking_call_in_a_change_is_not_taken_for_another_command(folder):
    with pytest.raises(BlockingIOError), change(folder):
        raise BlockingIOError(errno.EAGAIN, "not now")


def test_a_set_that_is_not_there_cannot_be_changed(tmp_path):
    refused(r"cannot open .*nothing: No such file", change(tmp_path / "nothing"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("free", [0, 40, 2000, 4900])
def test_a_full_disk_while_networks_are_written(folder, free):
    before = contents(folder)
    says = rf"cannot write .*{STAGING}.* The set is as it"
    with full_disk(free), pytest.raises(ModelSetError, match=says), change(folder) as staging:
        with_network(staging, num_convolutions=2)
    assert contents(folder) == before


def test_a_full_disk_says_where_and_leaves_the_set(folder):
    says = rf"{STAGING}/labels.*File too large; .*MB are free there"
    with full_disk(40), pytest.raises(ModelSetError, match=says), change(folder) as staging:
        staging.text("labels.txt", "x" * 50)
    # Texts and the note of what moves fit; the manifest, written last, does not.
    before = contents(folder)
    with full_disk(2000), pytest.raises(ModelSetError, match="cannot write"):
        change_texts(folder, hint="long" * 500)
    assert contents(folder) == before


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_move_that_fails_takes_back_the_others(folder, nth):
    before, calls = contents(folder), count(1)
    with (
        failing(Path, "replace", errno.EIO, lambda *_: next(calls) == nth),
        pytest.raises(ModelSetError, match="Input/output error"),
    ):
        change_texts(folder)
    assert next(calls) == nth + 1
    assert contents(folder) == before


@pytest.mark.parametrize("free", [0, 100, 3000])
def test_a_full_disk_while_a_set_is_made(folder, free):
    before = contents(folder.parent)
    with full_disk(free), pytest.raises(ModelSetError, match="cannot write"):
        replace(folder)
    assert contents(folder.parent) == before


def test_a_place_that_is_no_folder(tmp_path):
    (place := tmp_path / "file").write_text("mine")
    refused(r"cannot write .* Not a directory.* MB are free", create(place / "sets" / "mine"))
    refused("is no folder", create(place, is_replaced=True))
    assert contents(tmp_path) == {"file": b"mine"}


@pytest.fixture
def steps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """All that reaches the disk, in order: flush, rename (by its new name), remove."""
    done: list[Step] = []
    fsync, replace_file, unlink = os.fsync, os.replace, os.unlink

    def note(what: str, path: object) -> None:
        done.append((what, os.path.relpath(str(path), folder.parent)))

    def noted_fsync(opened: int) -> None:
        fsync(opened)
        note("flush", Path(f"/proc/self/fd/{opened}").readlink())

    def noted_replace(source: Path, target: Path) -> None:
        replace_file(source, target)
        note("rename", target)

    def noted_unlink(path: Path, *, dir_fd: int | None = None) -> None:
        unlink(path, dir_fd=dir_fd)
        note("remove", path)

    for name, noted in (
        ("fsync", noted_fsync),
        ("replace", noted_replace),
        ("unlink", noted_unlink),
    ):
        monkeypatch.setattr(os, name, noted)
    return done


def in_order(steps: list[Step], expected: list[Step]) -> bool:
    """Whether ``expected`` come in this order, with others between them."""
    left: Iterator[Step] = iter(steps)
    return all(step in left for step in expected)


def test_a_change_reaches_the_disk_before_anything_old_goes(folder, steps):
    before = {record.path for record in read_manifest(folder).files}
    change_texts(folder)
    new = {record.path for record in read_manifest(folder).files} - before
    assert len(new) == 2
    for name in new:
        expected = [
            ("flush", "tiny/.staging.partial/moving.json"),
            ("flush", f"tiny/.staging.partial/{name}"),
            ("rename", f"tiny/{name}"),
            ("flush", "tiny"),
            ("flush", "tiny/manifest.yaml.partial"),
            ("rename", "tiny/manifest.yaml"),
            ("flush", "tiny"),
            ("remove", "tiny/labels.txt"),
        ]
        assert in_order(steps, expected), name


def test_a_replacement_reaches_the_disk_before_the_old_set_goes(folder, steps):
    replace(folder)
    for record in read_manifest(folder).files:
        expected = [
            ("flush", f".tiny.partial/.staging.partial/{record.path}"),
            ("rename", f".tiny.partial/{record.path}"),
            ("flush", ".tiny.partial"),
            ("rename", ".tiny.partial/manifest.yaml"),
            ("flush", ".tiny.partial"),
            ("rename", ".tiny.old.partial"),
            ("rename", "tiny"),
            ("flush", "."),
            ("remove", ".tiny.old.partial/manifest.yaml"),
        ]
        assert in_order(steps, expected), record.path
    first_removed = next(path for what, path in steps if what == "remove" and ".old." in path)
    assert first_removed == ".tiny.old.partial/manifest.yaml"


def test_a_manifest_alone_reaches_the_disk_before_it_has_its_name(folder, steps):
    write_manifest(folder, read_manifest(folder))
    expected = [("flush", "tiny/manifest.yaml.partial"), ("rename", "tiny/manifest.yaml")]
    assert in_order(steps, expected)
    assert steps[-1] == ("flush", "tiny")


def test_a_disk_that_fails_to_flush_leaves_the_set_as_it_was(folder):
    before = contents(folder)
    with (
        failing(os, "fsync", errno.EIO),
        pytest.raises(ModelSetError, match=r"cannot write .*Input/output error"),
    ):
        change_texts(folder)
    assert contents(folder) == before
    with change(folder):
        assert set(contents(folder)) == set(before) | {".staging.partial"}


def test_a_file_system_that_cannot_flush_folders_is_done_without(folder):
    with failing(os, "fsync", errno.EINVAL):
        flush(folder)
