"""Children that talk, die, hang, or outlive their parent if nobody ends them."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.compute.child_process import Child, FunctionChild
from app.errors import ConfigError
from tests.support import children

SOON_S = 30.0


def python(code: str, **options: Any) -> Child:
    return Child("a child", [sys.executable, "-c", code], **options)


def deadline(seconds: float = SOON_S) -> float:
    return time.monotonic() + seconds


def wait_gone(pid: int) -> None:
    until = deadline()
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until, f"{pid} still runs"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("import os; os.kill(os.getpid(), 9)", "signal 9: memory ran out, most likely"),
        ("import os; os.kill(os.getpid(), 11)", "signal 11"),
        ("raise SystemExit(3)", "exit code 3"),
    ],
)
def test_how_it_ended(code, how):
    with python(code, remedy="do this") as child:
        assert child.how_ended() == how
        assert str(child.death()) == f"a child died ({how}); do this"


def test_one_that_cannot_be_started():
    with pytest.raises(ConfigError, match=r"a child could not be started: .*; is memory left\?"):
        Child("a child", ["/dev/null"])


def test_one_that_ends_with_its_input_has_time_to():
    with python("import sys; sys.stdin.read(); sys.exit(7)", patience_s=SOON_S) as child:
        pass
    assert child.how_ended() == "exit code 7"


def test_one_that_does_not_is_killed():
    with python("import time; time.sleep(600)", patience_s=0.1) as child:
        pass
    assert "signal 9" in child.how_ended()


def test_an_error_is_not_kept_waiting():
    began = time.monotonic()
    code = "import time; time.sleep(600)"
    with pytest.raises(KeyboardInterrupt), python(code, patience_s=600.0):
        raise KeyboardInterrupt
    assert time.monotonic() - began < SOON_S


def test_what_it_started_ends_with_it():
    code = (
        "import os, subprocess, sys, time;"
        "own = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        "os.write({}, str(own.pid).encode()); time.sleep(600)"
    )
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb", buffering=0) as said, os.fdopen(writer, "wb") as to_us:
        with python(code.format(writer), descriptors=[to_us.fileno()]):
            pid = int(said.read(20) or b"")
        wait_gone(pid)


def test_ctrl_c_of_the_terminal_is_not_its():
    with python("import time; time.sleep(600)") as child:
        assert psutil.Process(child.pid).terminal() is None
        parent_group, own = (
            subprocess.check_output(["ps", "-o", "pgid=", "-p", str(pid)], text=True).strip()
            for pid in (psutil.Process().pid, child.pid)
        )
        assert own == str(child.pid) != parent_group


def test_a_function_exchanges_objects():
    with FunctionChild("a child", children.adds, 10) as child:
        for number in (1, 2):
            child.send(number)
            assert child.receive(deadline()) == 10 + number
    assert child.has_ended


def test_a_function_that_says_nothing():
    with FunctionChild("a child", children.hangs) as child:
        assert child.receive(deadline(0.2)) is None


def test_a_function_that_dies():
    with FunctionChild("a child", children.dies, 3, remedy="do that") as child:
        with pytest.raises(ConfigError, match=r"a child died \(exit code 3\); do that"):
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
