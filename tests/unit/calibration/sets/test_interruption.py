"""Ctrl-C at any line, a kill at any step: the set is the old one or the new, and never another."""

import os
import shutil
import sys
import traceback
from contextlib import suppress
from functools import partial

import pytest

from calibration.sets import transaction
from calibration.sets.transaction import change, create
from models.manifest import read_manifest
from models.model_set import list_folders, load_model_set
from tests.support.calibration.staged_sets import (
    change_texts,
    contents,
    is_changed,
    is_whole,
    with_texts,
)
from tests.support.tiny_networks import write_tiny_set

KILL = 9  # exit code of a child that was killed
CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir"}  # events of Python's audit hooks
TRACED = {transaction.__file__}
ONE = {"sure": 8.0}


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

    def _trace(self, frame, event, _):
        if frame.f_code.co_filename not in TRACED:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                self.where = frame.f_code.co_name
                raise KeyboardInterrupt
        return self._trace


class KillAt:
    """Ends this process, nothing cleaned up, before the ``number``-th change that the disk sees."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, event, arguments):
        is_write = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if event in CHANGES or is_write:
            self.step()

    def step(self, *_: object) -> None:
        self.left -= 1
        if self.left == 0:
            os._exit(KILL)


def was_killed(number, work):
    """Run ``work`` in a child that is killed at its ``number``-th change; False: it ended first."""
    if (child := os.fork()) == 0:
        try:
            kill = KillAt(number)
            os.fsync = kill.step  # type: ignore[assignment]  # after a write, before it is on the disk
            sys.addaudithook(kill)
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, KILL)
    return code == KILL


@pytest.fixture(autouse=True)
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of changes: what reaches the disk, and when, is test_transaction's."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def own_files(folder):
    return {record.path for record in read_manifest(folder).files} | {"manifest.yaml"}


def replace_with_texts(folder, first):
    """Replace a set by a copy of ``first`` with other texts."""
    with create(folder, is_replaced=True) as staging:
        shutil.copytree(first, staging.folder, dirs_exist_ok=True)
        staging.move_in(with_texts(staging, read_manifest(first)))


def interrupts(first, folder, work):
    """Press Ctrl-C at each line of ``work``, on another copy of a set, and at last not at all.

    Yields the function that was interrupted, and where that was, for messages.
    """
    number, place = 0, "none yet"
    while place:
        number += 1
        shutil.copytree(first, folder, dirs_exist_ok=True)
        with InterruptAt(number) as interrupt, suppress(KeyboardInterrupt):
            work()
        place = interrupt.where
        yield place, f"line {number}, in {place}"
        shutil.rmtree(folder)


def test_ctrl_c_at_any_line_leaves_the_old_set_or_the_new(tmp_path):
    first, folder, met = write_tiny_set(tmp_path / "first", gains=ONE), tmp_path / "tiny", set()
    before = contents(first)
    for place, line in interrupts(first, folder, partial(change_texts, folder)):
        met.add(place)
        assert load_model_set(str(folder)).problems() == [], line
        if place in ("text", "move_in", "writing"):  # what follows tidies up
            assert is_changed(folder) or contents(folder) == before, line
        if place != "_locked":  # a lock that is not given back ends with the process
            with change(folder):
                pass
            assert set(contents(folder)) == own_files(folder), line
    assert met >= {"change", "text", "move_in", "_tidy", "_locked", "_remove"}


@pytest.mark.slow  # make test has Ctrl-C of a new set, above
def test_ctrl_c_at_any_line_of_a_replacement_leaves_the_old_set_or_the_new(tmp_path):
    first, folder = write_tiny_set(tmp_path / "first", gains=ONE), tmp_path / "sets" / "tiny"
    before, met = contents(first), set()
    for place, line in interrupts(first, folder, partial(replace_with_texts, folder, first)):
        met.add(place)
        assert is_whole(folder), line
        assert is_changed(folder) or contents(folder) == before, line
        assert list_folders((folder.parent,)) == [folder]
        if place in ("text", "move_in", "writing"):
            assert [p.name for p in folder.parent.iterdir()] == ["tiny"], line
    assert met >= {"create", "_put_back", "_locked", "move_in"}
    assert list(folder.parent.iterdir()) == []


def kills(folder, work):
    """Kill ``work`` at each of its steps, on another copy of one set, and at last not at all.

    Whatever the step, the name stands for the old set or the new, though another set of that name
    is in a place that is searched later.
    """
    first = write_tiny_set(folder.parents[1] / "first", gains=ONE)
    bundled = write_tiny_set(folder.parents[1] / "bundled" / "tiny", gains={"another": 1.0})
    before, number, is_killed = contents(first), 0, True
    while is_killed:
        number += 1
        shutil.copytree(first, folder)
        is_killed = was_killed(number, work)
        check_found(folder, bundled, before, f"step {number}")
        yield f"step {number}"
        shutil.rmtree(folder)
    assert number > 15


def check_found(folder, bundled, before, where):
    """The set that its name stands for is the old one or the new, whole."""
    found = load_model_set("tiny", (folder.parent, bundled.parent))
    assert found.problems() == [], where
    assert [member.name for member in found.manifest.members] == ["sure"], where
    assert is_changed(found.folder) or set(before) <= set(contents(found.folder)), where
    assert load_model_set(str(folder)).folder == found.folder
    assert list_folders((folder.parent,)) == [folder], where


def test_a_kill_at_any_step_of_a_change_leaves_the_old_set_or_the_new(tmp_path):
    folder = tmp_path / "sets" / "tiny"
    for step in kills(folder, partial(change_texts, folder)):
        with change(folder):  # the next command tidies up
            pass
        assert set(contents(folder)) == own_files(folder), step


@pytest.mark.slow  # make test has the kill of a change, above
def test_a_kill_at_any_step_of_a_replacement_leaves_the_old_set_or_the_new(tmp_path):
    folder, places = tmp_path / "sets" / "tiny", set()
    work = partial(replace_with_texts, folder, tmp_path / "first")
    for step in kills(folder, work):
        places.add(load_model_set(str(folder)).folder.name)
        work()  # the same command again
        assert is_changed(folder)
        assert is_whole(folder)
        assert [p.name for p in folder.parent.iterdir()] == ["tiny"], step
    assert places == {"tiny", ".tiny.old.partial"}  # it was killed between the two renames too


def test_a_replacement_that_was_killed_between_its_renames_is_said(folder, caplog):
    folder.replace(folder.with_name(".tiny.old.partial"))
    assert load_model_set("tiny", (folder.parent,)).folder.name == ".tiny.old.partial"
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"a command that replaced {folder} was interrupted" in line
    assert "run that command again" in line


def test_what_is_left_of_a_set_that_was_replaced_is_no_set(folder):
    """A kill while the old files go; then somebody removes the new set."""
    old = folder.with_name(".tiny.old.partial")
    shutil.copytree(folder, old)
    number, left = 1, contents(old)
    while set(left) == set(contents(folder)):
        assert was_killed(number, lambda: transaction._put_back(old, folder))
        number, left = number + 1, contents(old)
    assert set(contents(folder)) - set(left) == {"manifest.yaml"}  # it goes first
    shutil.rmtree(folder)
    assert list_folders((folder.parent,)) == []
