"""The fork server and the script that Ray starts, without Ray."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.environment import SET_LATE
from app.errors import ConfigError
from app.launch import forks
from app.launch.fork_client import SOCKET_VARIABLE, request
from app.launch.forks import (
    CLIENT,
    MAX_BODY_BYTES,
    NUM_STREAMS,
    ForkServerProcess,
    end_server,
    fork_server,
)

# What a process can tell of itself; then it ends as it is told to.
SCRIPT = """\
import json, os, signal, sys
print(json.dumps({
    "arguments": sys.argv, "parent": os.getppid(), "pid": os.getpid(), "folder": os.getcwd(),
    "group": os.getpgrp(), "name": __name__, "path": sys.path[0], "environment": dict(os.environ),
    "blocked": [int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
    "ignored": [n.name for n in (signal.SIGINT, signal.SIGHUP)
                if signal.getsignal(n) == signal.SIG_IGN],
    "imported": "colorsys" in sys.modules, "paths": sys.path,
    "files": sorted(map(int, os.listdir("/proc/self/fd")))[:-1],
}), flush=True)
if "wait" in sys.argv:
    sys.stdin.read()
sys.exit(7)
"""
ENVIRONMENT: dict[str, str] = {}  # under which the server was started


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "agent.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[ForkServerProcess, int]]:
    """One that has imported a module that nobody else here imports, and its process id."""
    monkeypatch.setattr(forks, "MODULES", ("not_installed_anywhere.part", "colorsys"))
    monkeypatch.setenv(SOCKET_VARIABLE, "")  # and as it was afterwards
    others = {child.pid for child in psutil.Process().children()}
    with fork_server(tmp_path) as started:
        ENVIRONMENT.clear()
        ENVIRONMENT.update({**os.environ})  # pytest changes a variable between setup and call
        (own,) = {child.pid for child in psutil.Process().children()} - others
        yield started, own


def client(script: Path, *arguments: str, **options: Any) -> "subprocess.Popen[str]":
    command: list[str | Path] = [sys.executable, CLIENT, script, *arguments]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, **{"env": ENVIRONMENT, **pipes, **options})


def told(process: "subprocess.Popen[str]") -> dict[str, Any]:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def test_a_fork_is_the_process_that_was_to_be_started(
    server: tuple[ForkServerProcess, int], script: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    environment = {**ENVIRONMENT, "RAY_JOB_ID": "01000000"}
    with client(script, "--a", "b", cwd=folder, env=environment) as process:
        found = told(process)
        assert process.wait() == 7
    assert found["parent"] == server[1]
    assert found["imported"]
    assert found["arguments"] == [str(script), "--a", "b"]
    assert (found["name"], found["path"]) == ("__main__", str(tmp_path))
    assert found["folder"] == str(folder)
    assert found["environment"] == environment
    assert found["blocked"] == []
    assert found["files"] == [0, 1, 2]  # nothing of the server's, or of other clients'


def test_blocked_signals_stay_blocked(server: tuple[ForkServerProcess, int], script: Path) -> None:
    def block() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})

    with client(script, preexec_fn=block) as process:
        assert told(process)["blocked"] == [signal.SIGINT]


def test_ignored_signals_stay_ignored(server: tuple[ForkServerProcess, int], script: Path) -> None:
    """As nohup has it: the hang-up of a terminal is for none of Ray's processes."""

    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    with client(script, preexec_fn=ignore) as process:
        assert told(process)["ignored"] == ["SIGHUP"]
    with client(script) as process:
        assert told(process)["ignored"] == []


def test_nothing_is_imported_from_the_working_folder(
    tmp_path: Path, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "another program"
    for name in ("app/__init__.py", "models/__init__.py", "requests.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("raise SystemExit('the working folder was imported')")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(forks, "MODULES", ("colorsys", "requests", "models"))
    with fork_server(tmp_path), client(script, env={**os.environ}) as process:
        report = told(process)
    assert report["imported"], "the server did not start"
    assert str(folder) not in report["paths"]


def test_who_leads_a_group_leads_one_as_a_fork(
    server: tuple[ForkServerProcess, int], script: Path
) -> None:
    """Ray kills the group of a worker that has ended: it must not be the command's."""
    with client(script, process_group=0) as process:
        found = told(process)
    assert found["group"] == found["pid"] != process.pid
    with client(script) as process:
        assert told(process)["group"] == os.getpgrp()


def test_another_environment_is_not_forked_for(
    server: tuple[ForkServerProcess, int], script: Path
) -> None:
    """What was imported may have read the variable: the client runs the script itself."""
    with client(script, env={**ENVIRONMENT, "PYTHON_X": "1"}) as process:
        found = told(process)
        assert process.wait() == 7
    assert found["pid"] == process.pid
    assert not found["imported"]
    assert found["arguments"] == [str(script)]
    assert (found["name"], found["path"]) == ("__main__", str(script.parent))


@pytest.mark.parametrize("name", SET_LATE)
def test_what_the_command_sets_later_is_the_forks_too(
    name: str, server: tuple[ForkServerProcess, int], script: Path
) -> None:
    with client(script, env={**ENVIRONMENT, name: "1"}) as process:
        found = told(process)
        assert process.wait() == 7
    assert found["parent"] == server[1]
    assert found["environment"][name] == "1"


def test_without_a_server_the_client_runs_the_script_itself(script: Path, tmp_path: Path) -> None:
    environment = {**os.environ, SOCKET_VARIABLE: str(tmp_path / "none.sock")}
    with client(script, env=environment) as process:
        assert told(process)["pid"] == process.pid
        assert process.wait() == 7


def test_who_ends_the_client_ends_the_fork(
    server: tuple[ForkServerProcess, int], script: Path
) -> None:
    with client(script, "wait") as process:
        fork = psutil.Process(told(process)["pid"])
        process.kill()
        process.wait()
        assert process.stdin is not None
        fork.wait(20)  # by SIGTERM: its standard input is open still
        process.stdin.close()


def test_a_fork_that_is_killed_ends_the_client(
    server: tuple[ForkServerProcess, int], script: Path
) -> None:
    with client(script, "wait") as process:
        os.kill(told(process)["pid"], signal.SIGKILL)
        assert process.wait(20) == 128 + signal.SIGKILL


def answer_to(body: bytes, num_streams: int = NUM_STREAMS) -> bytes:
    """Send a request's body as the client does; return the answer, b"" if there is none."""
    with socket.socket(socket.AF_UNIX) as connection, contextlib.suppress(ConnectionError):
        connection.settimeout(60)
        connection.connect(ENVIRONMENT[SOCKET_VARIABLE])
        socket.send_fds(connection, [b"\n"], [0, 1, 2][:num_streams])
        connection.sendall(body)
        connection.shutdown(socket.SHUT_WR)
        return connection.recv(1024)
    return b""


def test_a_request_that_is_none_leaves_the_server_well(
    server: tuple[ForkServerProcess, int], script: Path
) -> None:
    whole = json.dumps(request("none.py", []) | {"environment": {"PYTHON_X": "1"}}).encode()
    assert answer_to(whole + b"\n").startswith(b"refused: other")
    padded = whole.ljust(MAX_BODY_BYTES)
    malformed = (b"", b"\n", b"{}\n", b"[]\n", b"1\n", b"\xff\n", whole[:-1] + b', "other": 1}\n')
    for body in (*malformed, whole[:-1], whole, padded, padded + b"\n"):
        assert answer_to(body) == b"", body[:80]
    assert answer_to(whole + b"\n", num_streams=2) == b""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(ENVIRONMENT[SOCKET_VARIABLE])
    with client(script) as process:
        assert told(process)["parent"] == server[1]


def test_the_server_ends_with_its_forks(
    server: tuple[ForkServerProcess, int], script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client(script, "wait") as process:
        fork = psutil.Process(told(process)["pid"])
        end_server(server[0])
        assert not psutil.pid_exists(server[1])
        fork.wait(20)  # killed, after the grace it has
        assert process.stdin is not None
        process.stdin.close()


def test_what_the_server_imports_is_never_ray() -> None:
    """Forks of a process that has loaded Ray's library draw the same identities of tasks."""
    script = (
        "import sys; from app.launch.forks import import_all;"
        f"import_all({forks.MODULES}); print([m for m in sys.modules if m == 'ray'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_who_is_not_needed_any_more_imports_no_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that is refused does not wait for imports: seconds, on a busy machine."""
    waits = "import select, sys\nselect.select([sys.stdin], [], [])\n"
    (tmp_path / "waits_for_the_end.py").write_text(waits)
    (tmp_path / "imported_later.py").write_text(f"open({str(tmp_path / 'later')!r}, 'w')")
    monkeypatch.setattr(forks, "MODULES", ("waits_for_the_end", "imported_later"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv(SOCKET_VARIABLE, "")  # and as it was afterwards
    with fork_server(tmp_path) as server:
        pass
    assert server.returncode == 0
    assert not (tmp_path / "later").exists()


def test_a_server_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "ENDS_WITHIN_S", 0.1)
    line = [sys.executable, "-c", "import time; time.sleep(600)"]
    server = subprocess.Popen(line, stdin=subprocess.PIPE)
    end_server(server)
    assert server.returncode == -signal.SIGKILL


def test_a_server_that_cannot_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SOCKET_VARIABLE, "")  # and as it was afterwards
    monkeypatch.setattr(sys, "executable", "/dev/null")
    with (
        pytest.raises(ConfigError, match=r"the fork server could not be started: .*is memory left"),
        fork_server(tmp_path),
    ):
        pass
