"""models.whole_file: what is there before and after, and what is no plain file."""

import os
import stat
from pathlib import Path

import pytest

from models.whole_file import write_whole


def refuse(path: Path) -> None:
    assert path.read_text("utf-8") == "new"
    raise ValueError("not what it should be")


def test_a_file_that_is_refused_leaves_the_one_before(tmp_path: Path) -> None:
    (path := tmp_path / "file").write_text("old", "utf-8")
    with pytest.raises(ValueError, match="not what it should be"):
        write_whole(path, "new", refuse)
    assert path.read_text("utf-8") == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_one_and_its_file_is_checked(tmp_path: Path) -> None:
    (target := tmp_path / "file").write_text("old", "utf-8")
    (link := tmp_path / "link").symlink_to(target)
    with pytest.raises(ValueError, match="not what it should be"):
        write_whole(link, "new", refuse)
    write_whole(link, "new")
    assert link.is_symlink()
    assert target.read_text("utf-8") == "new"


def test_a_mode_is_the_files_before_it_has_content(tmp_path: Path) -> None:
    modes = list[int]()
    path = tmp_path / "file"
    write_whole(path, "new", lambda partial: modes.append(partial.stat().st_mode), mode=0o600)
    assert [stat.S_IMODE(mode) for mode in (*modes, path.stat().st_mode)] == [0o600, 0o600]
    write_whole(path, "newer")
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~_umask()


def _umask() -> int:
    os.umask(before := os.umask(0))
    return before


def test_what_is_no_file_is_written_to(tmp_path: Path) -> None:
    """As a pipe or /dev/stdout, which a command run by root could replace."""
    os.mkfifo(pipe := tmp_path / "pipe")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(pipe, "new")
        assert os.read(reader, 10) == b"new"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
