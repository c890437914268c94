"""Children: heard, interrupted, killed with all that they started."""

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from models.child_process import Child, last_words

SOON_S = 30.0
SLEEPS = "import time; time.sleep(600)"


@pytest.fixture
def python(tmp_path: Path):
    with (tmp_path / "log").open("wb") as printed:
        yield lambda code, **options: Child([sys.executable, "-c", code], printed, **options)


def deadline(seconds: float = SOON_S) -> float:
    return time.monotonic() + seconds


def test_its_lines_are_read_until_its_output_ends(python):
    with python("print('one'); print('two')", is_heard=True) as child:
        lines = [child.read_line(deadline()) for _ in range(3)]
    assert lines == [b"one", b"two", None]


def test_a_line_that_does_not_come_is_not_waited_for(python):
    code = f"print('half', end='', flush=True); {SLEEPS}"
    with python(code, is_heard=True) as child:
        assert child.read_line(deadline(0.2)) is None
        assert not child.has_ended()
    assert child.has_ended()


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("import os; os.kill(os.getpid(), 9)", "SIGKILL: memory ran out, most likely"),
        ("import os; os.kill(os.getpid(), 11)", "SIGSEGV"),
        ("raise SystemExit(3)", "exit code 3"),
    ],
)
def test_how_it_ended(python, code, how):
    with python(code) as child:
        assert child.how_ended() == how


def test_one_that_cannot_be_started(tmp_path):
    with (tmp_path / "log").open("wb") as printed, pytest.raises(PermissionError):
        Child(["/dev/null"], printed)


def test_it_can_be_interrupted(python):
    with python(f"print('ready', flush=True); {SLEEPS}", is_heard=True) as child:
        assert child.read_line(deadline()) == b"ready"
        child.interrupt(SOON_S)
        assert child.how_ended() == signal.Signals.SIGINT.name


def test_what_it_started_ends_with_it(python):
    code = (
        "import subprocess, sys;"
        f"print(subprocess.Popen([sys.executable, '-c', {SLEEPS!r}]).pid, flush=True); {SLEEPS}"
    )
    with python(code, is_heard=True) as child:
        pid = int(child.read_line(deadline()) or b"")
    until = deadline()
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until, f"{pid} still runs"
        time.sleep(0.01)


def test_ctrl_c_of_the_terminal_is_not_its(python):
    with python(SLEEPS) as child:
        assert psutil.Process(child.pid).terminal() is None
        assert os.getpgid(child.pid) == os.getsid(child.pid) == child.pid != os.getpgrp()


def test_it_inherits_the_files_that_are_named(python):
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as said, os.fdopen(writer, "wb") as to_us:
        code = f"import os; os.write({writer}, b'written')"
        with python(code, descriptors=[writer]) as child:
            assert child.has_ended(SOON_S)
        to_us.close()
        assert said.read() == b"written"


def test_it_has_the_environment_that_it_is_given(python, tmp_path):
    with python("import os; print(os.environ['A'])", environment={"A": "b"}) as child:
        assert child.has_ended(SOON_S)
    assert (tmp_path / "log").read_text() == "b\n"


def test_last_words(tmp_path):
    log = tmp_path / "log"
    assert last_words(log) == "it said nothing"
    log.write_text("first\n  no such module \n\n")
    assert last_words(log) == "no such module"
