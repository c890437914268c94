"""models.files: an earlier result outlives a full disk; links, modes and pipes.

The folders of an account that may have no home.
"""

import errno
import json
import os
import stat
from pathlib import Path

import pytest
from platformdirs import user_cache_path

from models import files
from models.errors import TandemError


def test_an_earlier_result_outlives_a_full_disk(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    files.write_json(path, {"top1": 0.9})
    whole = Path.write_bytes

    def half(self: Path, data: bytes) -> int:
        whole(self, data[:5])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(
        files.ResultFileError, match=r"cannot write \S+: No space left on device; make room"
    ):
        files.write_json(path, {"top1": 0.8})
    assert json.loads(path.read_text("utf-8")) == {"top1": 0.9}
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_takes_no_file_is_refused_before_the_work(tmp_path):
    """What is there may be written to, but a new file takes its place."""
    files.check_can_write(tmp_path / "new.json")
    files.check_can_write(Path("/dev/null"))
    files.check_can_write(Path("-"))
    (tmp_path / "loop").symlink_to("loop")
    long = tmp_path / ("x" * 250)  # with the suffix of a file that is being written
    missing = tmp_path / "missing" / "result.json"
    for path in (Path("/proc/result.json"), missing, tmp_path, tmp_path / "loop", long):
        with pytest.raises(files.ResultFileError, match="in a folder that can be written"):
            files.check_can_write(path)


def refuse(path: Path) -> None:
    assert path.read_text("utf-8") == "new"
    raise ValueError("not what it should be")


def test_a_file_that_is_refused_leaves_the_one_before_and_a_link_stays_one(tmp_path):
    (path := tmp_path / "file").write_text("old", "utf-8")
    (link := tmp_path / "link").symlink_to(path)
    for place in (path, link):
        with pytest.raises(ValueError, match="not what it should be"):
            files.write_whole(place, "new", refuse)
    assert (path.read_text("utf-8"), sorted(tmp_path.iterdir())) == ("old", [path, link])
    files.write_whole(link, "new")
    assert (link.is_symlink(), path.read_text("utf-8")) == (True, "new")


def test_a_mode_is_the_files_before_it_has_content(tmp_path):
    modes, path = list[int](), tmp_path / "file"
    files.write_whole(path, "new", lambda partial: modes.append(partial.stat().st_mode), mode=0o600)
    assert [stat.S_IMODE(mode) for mode in (*modes, path.stat().st_mode)] == [0o600, 0o600]
    files.write_whole(path, "newer")
    os.umask(umask := os.umask(0))
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


def test_what_is_no_file_is_written_to(tmp_path):
    """As a pipe or /dev/stdout, which a command run by root could replace."""
    os.mkfifo(pipe := tmp_path / "pipe")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        files.write_whole(pipe, "new")
        assert os.read(reader, 10) == b"new"
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def none(_: str) -> Path:
    raise RuntimeError("could not determine the home directory")


def test_a_folder_below_the_users_and_none_without_a_home(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert files.user_folder(user_cache_path, "a", "b") == tmp_path / "tandem" / "a" / "b"
    assert files.user_folder(none, "a") is None
    assert files.user_folder(lambda name: Path("~/.cache", name)) is None
    with pytest.raises(TandemError, match="no home folder; set HOME"):
        files.needed_folder(none)
