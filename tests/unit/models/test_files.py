"""models.files: an earlier result outlives a full disk; links, modes, pipes, absent homes.

And what another user left in a folder of all users is neither followed, waited for nor emptied.
"""

import errno
import json
import os
import stat
import subprocess
from pathlib import Path

import pytest
from platformdirs import user_cache_path

from models import files
from models.errors import TandemError
from tests.support.cases import cases


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


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR | os.O_CREAT, os.O_WRONLY])
@cases(
    "is_theirs, made, says",
    # Some kernels refuse to follow another user's link themselves.
    (True, "ln -s {file} name", "a link or a pipe|Permission denied"),
    (True, "mkfifo -m 666 name", "a link or a pipe|another user's .uid 65534"),
    (True, "echo theirs > name; chmod 666 name", "another user's .uid 65534"),
    (False, "ln -s {file} name", "a link or a pipe"),
    (False, "mkfifo name", "a link or a pipe|neither file nor folder"),
    (False, "ln {file} name", "a file with a second name"),
)
def test_what_is_no_plain_file_of_ours_is_not_opened(
    shared_place, neighbour, is_theirs, made, says, flags
):
    """A neighbour may link a victim's file where the kernel lets it (fs.protected_hardlinks)."""
    (file := shared_place / "file").write_text("precious", "utf-8")
    command = made.format(file=file)
    if is_theirs:
        neighbour(command)
    else:
        subprocess.run(["sh", "-ec", command], cwd=shared_place, check=True)
    with pytest.raises(PermissionError, match=says), files.locked(shared_place / "name", flags):
        pass
    assert file.read_text("utf-8") == "precious"


@cases("made", "mkdir -m 777 theirs", "mkdir -p -m 777 theirs/below", "ln -s {victims} theirs")
def test_a_folder_that_a_neighbour_made_first_is_not_used(
    shared_place, neighbour, tmp_path, monkeypatch, made
):
    """Nor one below it, which it can replace. Their link leads where only the victim can write."""
    neighbour(made.format(victims=tmp_path))
    for place in (shared_place / "theirs", shared_place / "theirs" / "below" / "it"):
        with pytest.raises(files.ForeignError, match="theirs is another user's"):
            files.make_folder(place)
        assert "another user's" in (files.why_not_written(place) or "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared_place / "theirs"))
    with pytest.raises(TandemError, match=r"cannot use .* another user's .* HOME"):
        files.needed_folder(user_cache_path)
    assert list(tmp_path.iterdir()) == []


def test_folders_of_ours_and_volumes_are_used(shared_place, neighbour, tmp_path):
    """A container's volume is often the host's user's. All users write to /tmp itself."""
    (shared_place / "link").symlink_to(tmp_path)
    os.chown(tmp_path, 65534, 65534)
    for place in (shared_place / "a" / "b", shared_place / "link" / "c", tmp_path / "d"):
        assert files.why_not_written(place) is None
        assert place.is_dir()
    assert "all users write there" in (files.why_not_written(shared_place) or "")


def test_a_result_is_not_written_through_a_neighbours_link(
    shared_place, neighbour, tmp_path, monkeypatch
):
    (file := tmp_path / "file").write_text("precious", "utf-8")
    monkeypatch.setattr(files, "_partial", lambda path: path.with_name("guessed"))
    neighbour(f"ln -s {file} guessed")
    result = shared_place / "result.json"
    for write in (files.check_can_write, lambda path: files.write_result(path, "new")):
        with pytest.raises(files.ResultFileError, match="File exists"):
            write(result)
    assert file.read_text("utf-8") == "precious"


@pytest.mark.parametrize("made", ["ln -s {file} result.json", "mkfifo -m 666 result.json"])
def test_a_neighbours_name_is_no_place_for_a_result(shared_place, neighbour, tmp_path, made):
    (file := tmp_path / "file").write_text("precious", "utf-8")
    neighbour(made.format(file=file))
    for write in (files.check_can_write, lambda path: files.write_result(path, "new")):
        with pytest.raises(
            files.ResultFileError, match=r"result.json is another user's .uid 65534"
        ):
            write(shared_place / "result.json")
    assert file.read_text("utf-8") == "precious"


def test_folders_that_may_be_there_are_made_by_one_function():
    root = Path(files.__file__).parents[1]
    for package in ("app", "models", "calibration"):
        for path in (root / package).rglob("*.py"):
            assert path.name == "files.py" or "exist_ok=True" not in path.read_text("utf-8"), path
