"""Children: commands and functions that are heard, interrupted, and killed with their own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from models.child_process import OUT_OF_MEMORY, Child, ChildDiedError, last_words, run_apart
from models.errors import ModelSetError
from tests.support import children

SOON_S = 30.0
LONG_S = 600.0
SLEEPS = children.SLEEPS
NOTHING = "it said nothing"
ROOT = Path(__file__).parents[3]
DEATHS = [
    ("import os; os.kill(os.getpid(), 9)", OUT_OF_MEMORY),
    ("import os; os.kill(os.getpid(), 11)", "SIGSEGV"),
    ("import os; os.abort()", "SIGABRT"),
    ("raise SystemExit(3)", "exit code 3"),
    ("raise ValueError('no')", "exit code 1"),
    ("import os; os._exit(0)", "exit code 0"),
]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    (tmp_path / "log").touch()
    return tmp_path / "log"


@pytest.fixture
def python(log: Path):
    with log.open("wb") as printed:
        yield lambda code, **options: Child([sys.executable, "-c", code], printed, **options)


def deadline(seconds: float = SOON_S) -> float:
    return time.monotonic() + seconds


def first_line(log: Path) -> str:
    until = deadline()
    while b"\n" not in log.read_bytes():
        assert time.monotonic() < until, "it printed no line"
        time.sleep(0.01)
    return log.read_text().splitlines()[0]


def wait_gone(*pids: int) -> None:
    until = deadline()
    for pid in pids:
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < until, f"{pid} still runs"
            time.sleep(0.01)


def test_it_can_be_interrupted_but_not_by_ctrl_c_of_the_terminal(python, log):
    with python(f"print('ready', flush=True); {SLEEPS}") as child:
        assert first_line(log) == "ready"
        assert psutil.Process(child.pid).terminal() is None
        assert os.getpgid(child.pid) == os.getsid(child.pid) == child.pid != os.getpgrp()
        child.interrupt(SOON_S)
        assert child.how_ended() == signal.Signals.SIGINT.name


def test_what_it_started_ends_with_it(python, log):
    code = (
        "import subprocess, sys;"
        f"print(subprocess.Popen([sys.executable, '-c', {SLEEPS!r}]).pid, flush=True); {SLEEPS}"
    )
    with python(code):
        pid = int(first_line(log))
    wait_gone(pid)


def test_it_has_the_environment_and_the_files_that_are_named(python):
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as said, os.fdopen(writer, "wb") as to_us:
        code = f"import os; os.write({writer}, os.environb[b'A'])"
        with python(code, environment={"A": "written"}, descriptors=[writer]) as child:
            assert child.has_ended(SOON_S)
        to_us.close()
        assert said.read() == b"written"


def test_last_words(log):
    assert last_words(log) == last_words(log.with_name("none")) == NOTHING
    log.write_text("first\n  no such \x1b[2J module \n\n")
    assert last_words(log) == "no such [2J module"


@pytest.fixture
def others():
    """What other tests have left to this process."""
    return set(psutil.Process().children())


def test_a_function_returns_its_result_and_is_heard_meanwhile(others):
    heard: list[int] = []
    assert run_apart(children.adds, 1, 2) == 3
    assert run_apart(children.tells_and_adds, 1, 2, heard=heard.append) == 3
    assert heard == [1, 2]
    assert set(psutil.Process().children()) <= others


@pytest.mark.parametrize(("code", "how"), DEATHS)
def test_a_function_that_dies(code, how, log):
    with log.open("wb") as printed, pytest.raises(ChildDiedError) as died:
        run_apart(children.runs, code, printed=printed)
    assert str(died.value) == how
    assert last_words(log) == ("ValueError: no" if "ValueError" in code else NOTHING)


def test_an_error_of_ours_is_the_callers_and_a_result_that_cannot_be_sent_a_death(log):
    with pytest.raises(ModelSetError, match=r"^no classifier$"):
        run_apart(children.refuses, "no classifier")
    with log.open("wb") as printed, pytest.raises(ChildDiedError, match="exit code 1"):
        run_apart(children.runs, "result = lambda: 0", printed=printed)
    assert "pickle" in last_words(log)


def test_a_parent_that_has_the_answer_does_not_interrupt_the_childs_end(log):
    """A KeyboardInterrupt there was 40 lines before the one of the refusal."""
    started = time.monotonic()
    with log.open("wb") as printed, pytest.raises(ModelSetError, match=r"^no$"):
        run_apart(children.refuses_and_ends_slowly, "no", printed=printed, patience_s=SOON_S)
    assert last_words(log) == NOTHING
    assert time.monotonic() - started < SOON_S  # it was not waited for until it was killed


def test_what_a_library_makes_of_the_parents_end_is_not_printed(log):
    def interrupted(_: tuple[int, int]) -> None:
        raise KeyboardInterrupt

    with log.open("wb") as printed, pytest.raises(KeyboardInterrupt):
        run_apart(
            children.makes_an_error_of_ctrl_c, heard=interrupted, printed=printed, patience_s=SOON_S
        )
    assert last_words(log) == NOTHING


def test_what_cannot_be_started_or_sent_leaves_no_child(monkeypatch, log, others):
    with pytest.raises(Exception, match="local object"):
        run_apart(lambda: None)
    with log.open("wb") as printed, pytest.raises(PermissionError):
        Child(["/dev/null"], printed)
    monkeypatch.setattr(sys, "executable", "/dev/null")
    with pytest.raises(ChildDiedError, match=r"it could not be started: .*Permission denied"):
        run_apart(children.adds, 1, 2)
    assert set(psutil.Process().children()) <= others


def test_after_the_limit_it_is_ended_with_what_it_started():
    pids: list[int] = []

    def heard(numbers: tuple[int, int]) -> float:
        pids.extend(numbers)
        return 0.1  # the new limit

    with pytest.raises(TimeoutError, match=r"no result within 0\.1 s"):
        run_apart(children.tells_and_hangs, heard=heard, limit_s=LONG_S)
    wait_gone(*pids)


@pytest.mark.parametrize("patience_s", [0.0, SOON_S, 0.3])
def test_ctrl_c_ends_it_and_lets_it_clean_up_if_asked_to_and_in_time(tmp_path, patience_s):
    pids: list[int] = []

    def interrupted(numbers: tuple[int, int]) -> None:
        pids.extend(numbers)
        raise KeyboardInterrupt

    function = [children.ignores_ctrl_c] if patience_s == 0.3 else [children.cleans_up, tmp_path]
    with pytest.raises(KeyboardInterrupt):
        run_apart(*function, heard=interrupted, patience_s=patience_s)
    wait_gone(*pids)
    assert (tmp_path / "cleaned-up").exists() is (patience_s == SOON_S)


PARENT = """
import sys
from pathlib import Path
from models.child_process import run_apart
from tests.support import children

def heard(numbers):
    print(*numbers, flush=True)

run_apart(children.cleans_up, Path(sys.argv[1]), heard=heard, patience_s=float(sys.argv[2]))
"""


@pytest.mark.parametrize("patience_s", [0.0, SOON_S])
def test_it_ends_quietly_with_a_parent_that_is_killed(tmp_path: Path, patience_s: float):
    command = [sys.executable, "-c", PARENT, str(tmp_path), str(patience_s)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, cwd=ROOT) as parent:
        pids = map(int, parent.stdout.readline().split())
        parent.kill()
        wait_gone(*pids)
        assert parent.stderr.read() == b""
    assert (tmp_path / "cleaned-up").exists() is (patience_s > 0)


def test_its_output_and_modules_are_its_own(capfd, log, tmp_path, monkeypatch):
    code = "import os; os.write(1, b'parser'); os.write(2, b'warning')"
    run_apart(children.runs, code)
    assert capfd.readouterr() == ("", "warning")
    with log.open("wb") as printed:
        run_apart(children.runs, code, printed=printed)
    assert (log.read_text(), capfd.readouterr()) == ("parserwarning", ("", ""))
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").write_text("raise SystemExit('not ours')")
    monkeypatch.chdir(tmp_path)
    assert run_apart(children.adds, 1, 2) == 3
