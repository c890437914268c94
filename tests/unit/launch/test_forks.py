"""The fork server and the script that Ray starts, without Ray."""

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import psutil
import pytest

from app.environment import SET_LATE
from app.errors import ConfigError
from app.launch import forks
from app.launch.fork_client import PUBLISHING, SOCKET_VARIABLE, request
from app.telemetry.export import FLUSH_EVERY_S
from app.telemetry.metrics import QUEUE_EVERY_S
from tests.support.cases import cases

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


class Server(NamedTuple):
    process: forks.ForkServerProcess
    pid: int
    environment: dict[str, str]  # under which it was started


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "agent.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """One that has imported a module that nobody else here imports."""
    monkeypatch.setattr(forks, "MODULES", ("not_installed_anywhere.part", "colorsys"))
    monkeypatch.setenv(SOCKET_VARIABLE, "")  # and as it was afterwards
    others = {child.pid for child in psutil.Process().children()}
    with forks.fork_server(tmp_path) as started:
        (own,) = {child.pid for child in psutil.Process().children()} - others
        # pytest changes a variable between setup and call
        yield Server(started, own, {**os.environ})


def client(script: Path, *arguments: str, env: Any, **options: Any) -> "subprocess.Popen[str]":
    command: list[str | Path] = [sys.executable, forks.CLIENT, script, *arguments]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, env=env, **pipes, **options)


def told(process: "subprocess.Popen[str]") -> dict[str, Any]:
    return json.loads(process.stdout.readline())


def test_a_fork_is_the_process_that_was_to_be_started(server, script, tmp_path):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    environment = {**server.environment, "RAY_JOB_ID": "01000000"}
    with client(script, "--a", "b", cwd=folder, env=environment) as process:
        reply = told(process)
        assert process.wait() == 7
    expected = {
        "parent": server.pid,
        "imported": True,
        "arguments": [str(script), "--a", "b"],
        "name": "__main__",
        "path": str(tmp_path),
        "folder": str(folder),
        "environment": environment,
        "blocked": [],
        "ignored": [],
        "files": [0, 1, 2],  # nothing of the server's, or of other clients'
    }
    assert {key: reply[key] for key in expected} == expected


@cases(
    "key, signals, change",
    ("blocked", [signal.SIGINT], (signal.pthread_sigmask, signal.SIG_BLOCK, {signal.SIGINT})),
    ("ignored", ["SIGHUP"], (signal.signal, signal.SIGHUP, signal.SIG_IGN)),
)
def test_signals_stay_blocked_and_ignored(server, script, key, signals, change):
    """As nohup has it: the hang-up of a terminal is for none of Ray's processes."""
    with client(script, env=server.environment, preexec_fn=functools.partial(*change)) as process:
        assert told(process)[key] == signals


def test_nothing_is_imported_from_the_working_folder(tmp_path, script, monkeypatch):
    folder = tmp_path / "another program"
    for name in ("app/__init__.py", "models/__init__.py", "requests.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("raise SystemExit('the working folder was imported')")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(forks, "MODULES", ("colorsys", "requests", "models"))
    with forks.fork_server(tmp_path), client(script, env={**os.environ}) as process:
        report = told(process)
    assert report["imported"], "the server did not start"
    assert str(folder) not in report["paths"]


def test_who_leads_a_group_leads_one_as_a_fork(server, script):
    """Ray kills the group of a worker that has ended: it must not be the command's."""
    with client(script, env=server.environment, process_group=0) as process:
        reply = told(process)
    assert reply["group"] == reply["pid"] != process.pid
    with client(script, env=server.environment) as process:
        assert told(process)["group"] == os.getpgrp()


@pytest.mark.parametrize("other", [{"PYTHON_X": "1"}, {SOCKET_VARIABLE: "/nowhere/none.sock"}])
def test_for_another_environment_or_without_a_server_the_client_runs_the_script(
    server, script, other
):
    """What was imported may have read the variable."""
    with client(script, env=server.environment | other) as process:
        reply = told(process)
        assert process.wait() == 7
    assert (reply["pid"], reply["imported"]) == (process.pid, False)
    assert reply["arguments"] == [str(script)]
    assert (reply["name"], reply["path"]) == ("__main__", str(script.parent))


@pytest.mark.parametrize("name", SET_LATE)
def test_what_the_command_sets_later_is_the_forks_too(name, server, script):
    with client(script, env={**server.environment, name: "1"}) as process:
        reply = told(process)
        assert process.wait() == 7
    assert (reply["parent"], reply["environment"][name]) == (server.pid, "1")


def test_who_ends_the_client_ends_the_fork(server, script):
    with client(script, "wait", env=server.environment) as process:
        fork = psutil.Process(told(process)["pid"])
        process.kill()
        process.wait()
        fork.wait(20)  # by SIGTERM: its standard input is open still
        process.stdin.close()


def test_a_fork_that_is_killed_ends_the_client(server, script):
    with client(script, "wait", env=server.environment) as process:
        os.kill(told(process)["pid"], signal.SIGKILL)
        assert process.wait(20) == 128 + signal.SIGKILL


def answer_to(socket_path: str, body: bytes, num_streams: int = forks.NUM_STREAMS) -> bytes:
    """Send a request's body as the client does; return the answer, b"" if there is none."""
    with socket.socket(socket.AF_UNIX) as connection, contextlib.suppress(ConnectionError):
        connection.settimeout(60)
        connection.connect(socket_path)
        socket.send_fds(connection, [b"\n"], [0, 1, 2][:num_streams])
        connection.sendall(body)
        connection.shutdown(socket.SHUT_WR)
        return connection.recv(1024)
    return b""


def test_workers_publish_their_metrics_within_seconds_unless_the_user_says_otherwise(monkeypatch):
    ((name, often),) = PUBLISHING.items()
    assert FLUSH_EVERY_S + QUEUE_EVERY_S + int(often) / 1e3 <= 5

    def given(target: str | None) -> str | None:
        return cast(dict[str, str], request(target, [])["environment"]).get(name)

    assert (given(None), given("agent.py")) == (often, None)
    monkeypatch.setenv(name, "500")
    assert given(None) == "500"


def test_a_request_that_is_none_leaves_the_server_well(server, script):
    path = server.environment[SOCKET_VARIABLE]
    whole = json.dumps(request("none.py", []) | {"environment": {"PYTHON_X": "1"}}).encode()
    assert answer_to(path, whole + b"\n").startswith(b"refused: other")
    padded = whole.ljust(forks.MAX_BODY_BYTES)
    malformed = (b"", b"\n", b"{}\n", b"[]\n", b"1\n", b"\xff\n", whole[:-1] + b', "other": 1}\n')
    for body in (*malformed, whole[:-1], whole, padded, padded + b"\n"):
        assert answer_to(path, body) == b"", body[:80]
    assert answer_to(path, whole + b"\n", num_streams=2) == b""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
    with client(script, env=server.environment) as process:
        assert told(process)["parent"] == server.pid


def test_the_server_ends_with_its_forks(server, script):
    with client(script, "wait", env=server.environment) as process:
        fork = psutil.Process(told(process)["pid"])
        forks.end_server(server.process)
        assert not psutil.pid_exists(server.pid)
        fork.wait(20)  # killed, after the grace it has
        process.stdin.close()


def test_what_the_server_imports_is_never_ray() -> None:
    """Forks of a process that has loaded Ray's library draw the same identities of tasks."""
    script = (
        "import sys; from app.launch.forks import import_all;"
        f"import_all({forks.MODULES}); print([m for m in sys.modules if m == 'ray'])"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_who_is_not_needed_any_more_imports_no_further(tmp_path, monkeypatch):
    """A command that is refused does not wait for imports: seconds, on a busy machine."""
    waits = "import select, sys\nselect.select([sys.stdin], [], [])\n"
    (tmp_path / "waits_for_the_end.py").write_text(waits)
    (tmp_path / "imported_later.py").write_text(f"open({str(tmp_path / 'later')!r}, 'w')")
    monkeypatch.setattr(forks, "MODULES", ("waits_for_the_end", "imported_later"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv(SOCKET_VARIABLE, "")  # and as it was afterwards
    with forks.fork_server(tmp_path) as server:
        pass
    assert server.returncode == 0
    assert not (tmp_path / "later").exists()


def test_a_server_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "ENDS_WITHIN_S", 0.1)
    line = [sys.executable, "-c", "import time; time.sleep(600)"]
    server = subprocess.Popen(line, stdin=subprocess.PIPE)
    forks.end_server(server)
    assert server.returncode == -signal.SIGKILL


def test_a_server_that_cannot_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SOCKET_VARIABLE, "")  # and as it was afterwards
    monkeypatch.setattr(sys, "executable", "/dev/null")
    says = r"the fork server could not be started: .*is memory left"
    with pytest.raises(ConfigError, match=says), forks.fork_server(tmp_path):
        pass
