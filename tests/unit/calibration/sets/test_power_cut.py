"""What a power cut leaves: nothing is removed, or named, before the disk has what replaces it."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from calibration.sets.transaction import change, write_manifest
from calibration.sets.versions import flush
from models.errors import ModelSetError
from models.manifest import read_manifest
from tests.support.calibration.staged_sets import change_texts, contents, failing, replace

Step = tuple[str, str]  # what was done, to which path below the set's parent


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
