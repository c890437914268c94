"""What a test starts ends with the test, even if that is killed."""

import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import psutil

from tests.support.services import ends_with_parent
from tests.support.services.ends_with_parent import PARENT_ENDED, ending_with_parent

ROOT = Path(__file__).parents[3]
CHILD = """
import os, signal
def say(*_):
    print("interrupted")
    raise SystemExit
signal.signal(signal.SIGINT, say)
signal.alarm(60)  # ends it without a word
print(os.getpid(), flush=True)
signal.pause()
"""
PARENT = f"""
import subprocess, sys
from tests.support.services.ends_with_parent import ending_with_parent
subprocess.Popen(ending_with_parent([sys.executable, "-c", {CHILD!r}]), start_new_session=True)
print("started", flush=True)
sys.stdin.read()
"""


def test_a_child_is_interrupted_when_its_parent_is_killed() -> None:
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, cwd=ROOT, stdin=PIPE, stdout=PIPE, text=True) as parent:
        started, pid = sorted([parent.stdout.readline(), parent.stdout.readline()], reverse=True)
        child = psutil.Process(int(pid))
        assert started == "started\n"
        assert child.ppid() == parent.pid
        parent.kill()
        assert parent.stdout.read() == "interrupted\n"  # and then nobody has the pipe any more
        child.wait(60)


def test_a_command_whose_parent_has_ended_already_is_not_run() -> None:
    script = Path(ends_with_parent.__file__)
    somebody_else: list[str | Path] = [sys.executable, script, "1", "echo", "run"]
    done = subprocess.run(somebody_else, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (PARENT_ENDED, "")


def test_arguments_and_exit_code_are_the_commands_own() -> None:
    command = ending_with_parent(["sh", "-c", 'echo "$1"; exit 7', "sh", "two words"])
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (7, "two words\n")
