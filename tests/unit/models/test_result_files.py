"""models.result_files: an earlier result outlives a full disk."""

import errno
import json
from pathlib import Path

import pytest

from models.result_files import ResultFileError, check_can_write, write_json


def test_an_earlier_result_outlives_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "result.json"
    write_json(path, {"top1": 0.9})
    whole = Path.write_bytes

    def half(self: Path, data: bytes) -> int:
        whole(self, data[:5])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(
        ResultFileError, match=r"cannot write \S+: No space left on device; make room"
    ):
        write_json(path, {"top1": 0.8})
    assert json.loads(path.read_text("utf-8")) == {"top1": 0.9}
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_takes_no_file_is_refused_before_the_work(tmp_path: Path) -> None:
    """What is there may be written to, but a new file takes its place."""
    check_can_write(tmp_path / "new.json")
    check_can_write(Path("/dev/null"))
    check_can_write(Path("-"))
    (tmp_path / "loop").symlink_to("loop")
    long = tmp_path / ("x" * 250)  # with the suffix of a file that is being written
    missing = tmp_path / "missing" / "result.json"
    for path in (Path("/proc/result.json"), missing, tmp_path, tmp_path / "loop", long):
        with pytest.raises(ResultFileError, match="in a folder that can be written"):
            check_can_write(path)
