"""Ctrl-C at any line and a kill: the set is the old one or the new."""

import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from calibration.sets import staging, transaction
from calibration.sets.transaction import change, create
from models.manifest import read_manifest
from models.model_set import list_folders, load_model_set
from tests.support.calibration.staged_sets import contents, is_changed, is_whole, with_texts
from tests.support.tiny_networks import write_tiny_set


class InterruptAt:
    """Ctrl-C before the ``number``-th line that runs in a change; ``where``: its function."""

    def __init__(self, number: int) -> None:
        self.left = number
        self.where = ""

    def __enter__(self) -> "InterruptAt":
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in (staging.__file__, transaction.__file__):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                self.where = frame.f_code.co_name
                raise KeyboardInterrupt
        return self._trace


def test_ctrl_c_at_any_line_leaves_the_old_set_or_the_new(tmp_path):
    first = write_tiny_set(tmp_path / "first", gains={"sure": 8.0})
    before, manifest = contents(first), read_manifest(first)
    folder, met = tmp_path / "tiny", {}
    while "" not in met.values():
        shutil.copytree(first, folder)
        with (
            InterruptAt(len(met) + 1) as interrupt,
            suppress(KeyboardInterrupt),
            change(folder) as staging,
        ):
            staging.move_in(with_texts(staging, manifest))
        place = met[len(met) + 1] = interrupt.where
        loaded = load_model_set(str(folder))
        assert loaded.problems() == [], f"line {len(met)}, in {place}"
        if place in ("text", "move_in", "writing"):  # what follows tidies up
            assert is_changed(folder) or contents(folder) == before, f"line {len(met)}, in {place}"
        if place != "_locked":  # a lock that is not given back ends with the process
            with change(folder):
                pass
            files = {record.path for record in loaded.manifest.files}
            assert set(contents(folder)) == files | {"manifest.yaml"}, f"line {len(met)}"
        shutil.rmtree(folder)
    assert set(met.values()) >= {"change", "text", "move_in", "_tidy", "_locked", "_remove"}


def test_ctrl_c_at_any_line_of_a_replacement_leaves_the_old_set_or_the_new(tmp_path):
    first = write_tiny_set(tmp_path / "first", gains={"sure": 8.0})
    before, manifest = contents(first), read_manifest(first)
    folder, met = tmp_path / "sets" / "tiny", {}
    while "" not in met.values():
        shutil.copytree(first, folder, dirs_exist_ok=True)
        with (
            InterruptAt(len(met) + 1) as interrupt,
            suppress(KeyboardInterrupt),
            create(folder, is_replaced=True) as staging,
        ):
            shutil.copytree(first, staging.folder, dirs_exist_ok=True)
            staging.move_in(with_texts(staging, manifest))
        place = met[len(met) + 1] = interrupt.where
        assert is_whole(folder), f"line {len(met)}, in {place}"
        assert is_changed(folder) or contents(folder) == before, f"line {len(met)}, in {place}"
        assert list_folders((folder.parent,)) == [folder]
        if place in ("text", "move_in", "writing"):
            assert [p.name for p in folder.parent.iterdir()] == ["tiny"], f"line {len(met)}"
        shutil.rmtree(folder)
    assert set(met.values()) >= {"create", "_swap", "_put_back", "_locked", "move_in"}
    assert list(folder.parent.iterdir()) == []


KILLED = """
import os, signal, sys
from pathlib import Path
from calibration.sets import staging, transaction

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

staging.write_manifest = die
with transaction.change(Path(sys.argv[1])) as files:
    manifest = staging.read_manifest(files.folder)
    labels = files.text("labels.txt", "a\\nb\\nc\\n")
    files.move_in(manifest.model_copy(update={"labels": labels}))
"""


def test_what_a_killed_change_left_goes_with_the_next(folder):
    before = contents(folder)
    root = Path(transaction.__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", KILLED, folder], cwd=root, check=False)
    assert done.returncode == -9
    left = set(contents(folder)) - set(before)
    assert {name.partition("-")[0] for name in left if "/" not in name} >= {"labels"}
    assert is_whole(folder)
    with change(folder):
        assert set(contents(folder)) == set(before) | {".staging.partial"}
    assert contents(folder) == before
