"""Children that run a function: they talk, die, hang, or would outlive their parent."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from app.compute.child_process import FunctionChild
from app.errors import ConfigError
from tests.support import children

SOON_S = 30.0


def deadline(seconds: float = SOON_S) -> float:
    return time.monotonic() + seconds


def wait_gone(pid: int) -> None:
    until = deadline()
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until, f"{pid} still runs"
        time.sleep(0.01)


def test_one_that_cannot_be_started(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/dev/null")
    with pytest.raises(ConfigError, match=r"a child could not be started: .*; is memory left\?"):
        FunctionChild("a child", children.hangs)


def test_a_function_exchanges_objects():
    with FunctionChild("a child", children.adds, 10) as child:
        for number in (1, 2):
            child.send(number)
            assert child.receive(deadline()) == 10 + number
    assert child.has_ended()


def test_a_function_that_says_nothing():
    with FunctionChild("a child", children.hangs) as child:
        assert child.receive(deadline(0.2)) is None


def test_a_function_that_dies():
    with FunctionChild("a child", children.dies, 3) as child:
        with pytest.raises(ConfigError, match=r"a child died \(exit code 3\); is memory left\?"):
            child.receive(deadline())
        with pytest.raises(ConfigError, match="exit code 3"):
            child.send(1)


def test_a_function_that_cannot_be_sent_leaves_no_child():
    before = psutil.Process().children()
    with pytest.raises(Exception, match="local object"):
        FunctionChild("a child", lambda _: None)
    assert psutil.Process().children() == before


def test_it_ends_with_a_parent_that_is_killed(tmp_path: Path):
    """Also while it works and reads nothing."""
    code = (
        "import time;"
        "from app.compute.child_process import FunctionChild;"
        "from tests.support import children;"
        "child = FunctionChild('a child', children.tells_and_hangs);"
        "print(child.receive(time.monotonic() + 60), flush=True); time.sleep(600)"
    )
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    wait_gone(pid)


def test_the_working_folder_holds_none_of_its_modules(tmp_path, monkeypatch):
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__init__.py").write_text("raise SystemExit('not ours')")
    monkeypatch.chdir(tmp_path)
    with FunctionChild("a child", children.adds, 1) as child:
        child.send(1)
        assert child.receive(deadline()) == 2
