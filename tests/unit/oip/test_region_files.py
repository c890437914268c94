"""Files of shared memory, and what may happen to them while they are used."""

import os
from pathlib import Path

import pytest

from app.errors import BadRegionError
from app.oip.region_files import OpenFile, file_name, opened, read_at, write_at
from tests.support.open_files import open_files


@pytest.mark.parametrize("key", ["k", "/k", "a b", ".k", "..k", "ü", "k" * 255])
def test_names_of_files_with_or_without_the_slash_of_shm_open(key: str) -> None:
    assert file_name(key) == key.removeprefix("/")


@pytest.mark.parametrize(
    "key",
    [
        *("", "/", ".", "..", "...", "/..", "a/b", "//k", "/k/", "../k", "/dev/shm/k", "a\0b"),
        *("k" * 256, "ü" * 128, "\ud800", None, 3, ["k"], b"k", True),
    ],
)
def test_what_names_no_file_of_the_folder(key: object) -> None:
    with pytest.raises(BadRegionError, match="key is ") as refused:
        file_name(key)
    assert len(refused.value.message) < 300


def test_a_file_is_read_and_written_at_any_place(tmp_path: Path) -> None:
    place = tmp_path / "k"
    place.write_bytes(bytes(range(10)))
    with opened(tmp_path, "k", is_writing=True) as file:
        assert (file.size, read_at(file, 3, 4)) == (10, bytes([3, 4, 5, 6]))
        write_at(file, 8, b"xy")
    assert place.read_bytes() == bytes(range(8)) + b"xy"


def test_files_are_closed_whatever_happens(tmp_path: Path) -> None:
    (tmp_path / "k").write_bytes(b"1")
    with pytest.raises(KeyError), opened(tmp_path, "k") as file:
        raise KeyError
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file.descriptor)


def test_a_file_that_is_cut_short_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    """As a mapping, it would be the end of the process (SIGBUS)."""
    place = tmp_path / "k"
    place.write_bytes(bytes(100_000))
    with opened(tmp_path, "k") as file:
        os.truncate(place, 5000)
        with pytest.raises(BadRegionError, match="ended after 5000 of 100000 bytes"):
            read_at(file, 0, 100_000)
        os.truncate(place, 0)
        with pytest.raises(BadRegionError, match="ended after 0 of 1 bytes"):
            read_at(file, 0, 1)


def test_a_file_that_is_gone_while_it_is_used_is_still_this_one(tmp_path: Path) -> None:
    place = tmp_path / "k"
    place.write_bytes(b"mine")
    with opened(tmp_path, "k") as file:
        place.unlink()
        place.write_bytes(b"else")
        assert read_at(file, 0, 4) == b"mine"


def test_full_memory_is_an_error() -> None:
    descriptor = os.open("/dev/full", os.O_RDWR)
    try:
        with pytest.raises(BadRegionError, match="took 0 of 3 bytes: No space left"):
            write_at(OpenFile(descriptor, (0, 0), 3), 0, b"abc")
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("is_writing", [False, True])
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda place: None, "No such file"),
        (lambda place: place.mkdir(), "no regular file|Is a directory"),
        (lambda place: place.symlink_to(place.with_name("other")), "symbolic links"),
        (lambda place: os.mkfifo(place), "no regular file"),
    ],
)
def test_what_is_no_regular_file_is_not_opened_and_not_waited_for(
    tmp_path: Path, make, says: str, is_writing: bool
) -> None:
    (tmp_path / "other").write_bytes(b"secret")
    make(tmp_path / "k")
    before = open_files()
    with pytest.raises(BadRegionError, match=says), opened(tmp_path, "k", is_writing=is_writing):
        pass
    assert not open_files() - before
