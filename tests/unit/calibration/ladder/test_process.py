"""A rung's process that answers, dies, hangs, talks nonsense, or is ended by Ctrl-C."""

import os
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from calibration.ladder.process import WORKER, run_task
from calibration.ladder.rung import LadderError, RungResult, RungTask
from calibration.ladder.store import Store
from tests.support.calibration.ladders import measured, tiny_task

SAY = "import os, sys, pathlib; say = lambda t: os.write(1, t.encode() + b'\\n');"
RESULT = measured(7.0).model_dump_json()
ANSWER = f"pathlib.Path(sys.argv[2]).write_text({RESULT!r});"


@pytest.fixture
def store(tmp_path: Path):
    store = Store(tmp_path)
    with store.opened({}, is_resumed=False):
        yield store


def run(store: Store, code: str, **more) -> RungResult:
    task = tiny_task(store.folder, store.folder, "openvino")

    def make_command(*files: Path) -> list[str]:
        return [sys.executable, "-c", SAY + code, *map(str, files)]

    return run_task(store, "latency", task, make_command=make_command, **more)


def test_its_module_exists():
    assert find_spec(WORKER) is not None


def test_it_is_told_its_task_and_its_answer_comes_back(store):
    heard: list[str] = []
    code = "say('{\"event\": \"measuring\"}'); say('nonsense'); say('[]');" + ANSWER
    assert run(store, code, say=heard.append) == measured(7.0)
    assert heard == ["measuring"]
    task_file = store.task_files("latency")[0]
    assert RungTask.model_validate_json(task_file.read_bytes()).engine == "openvino"


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("os.kill(os.getpid(), 9)", "memory ran out, most likely"),
        ("os.kill(os.getpid(), 11)", "SIGSEGV"),
        ("raise SystemExit(3)", "exit code 3"),
        ("sys.exit('no such module')", "no such module"),
        ("pathlib.Path(sys.argv[2]).write_text('{')", "exit code 0"),
    ],
)
def test_one_that_dies_is_a_failed_rung_that_says_how(store, code, how):
    result = run(store, code)
    assert result.outcome == "failed"
    assert how in result.reason


def test_one_that_hangs_is_given_up_and_ended(store):
    pid = store.folder / "pid"
    code = f"pathlib.Path({str(pid)!r}).write_text(str(os.getpid())); import time; time.sleep(600)"
    result = run(store, code, start_limit_s=3.0)
    assert result.outcome == "skipped"
    assert "not ready to run within 3 s" in result.reason
    assert not psutil.pid_exists(int(pid.read_text()))


def test_ctrl_c_ends_it_and_what_it_started(store):
    pids = store.folder / "pids"
    code = (
        "import subprocess, time;"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        f"pathlib.Path({str(pids)!r}).write_text(f'{{os.getpid()}} {{child.pid}}');"
        'say(\'{"event": "measuring"}\'); time.sleep(600)'
    )

    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(store, code, say=interrupt)
    ours, its_child = map(int, pids.read_text().split())
    assert not psutil.pid_exists(ours)
    deadline = time.monotonic() + 30  # its child is somebody else's to wait for
    while psutil.pid_exists(its_child) and time.monotonic() < deadline:
        if psutil.Process(its_child).status() == psutil.STATUS_ZOMBIE:
            break
        time.sleep(0.01)
    assert time.monotonic() < deadline
    assert not store.task_files("latency")[1].exists()


def test_a_process_that_cannot_be_started(store):
    task = tiny_task(store.folder, store.folder, "openvino")
    with pytest.raises(LadderError, match="could not be started"):
        run_task(store, "latency", task, make_command=lambda *_: [os.devnull])
