"""What watches a service: ends of real processes, memory, readiness, what systemd is told."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import psutil
import pytest

from app.errors import ServiceEndedError
from app.launch import supervisor
from app.launch.forks import SERVER_MODULE
from app.launch.ray_cluster import StopRequest
from app.launch.supervisor import OUT_OF_MEMORY, Processes, Readiness, ask_of, supervise
from models.machine import num_oom_kills
from tests.support.cgroup_files import CgroupFiles
from tests.support.services.processes import EVENTUALLY_S, wait_until

RAYLET = "/somewhere/raylet/raylet"
Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a shell that waits, then ends with code 3, by any name and program's name."""
    with ExitStack() as stack:

        def started(title: str, program: str = "sh") -> "subprocess.Popen[bytes]":
            path = tmp_path / program
            if not path.exists():
                path.symlink_to("/bin/sh")
            command = [title, "-c", "read line; exit 3"]
            process = subprocess.Popen(command, executable=path, stdin=subprocess.PIPE)
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield started


@pytest.fixture
def stop() -> StopRequest:
    return StopRequest()


def test_the_end_of_a_process_that_is_needed_is_told_at_once(start, stop):
    raylet = start(RAYLET)
    processes = Processes({}, pytest.fail)
    processes.look(stop, 0)
    raylet.kill()
    with pytest.raises(ServiceEndedError) as caught:
        processes.look(stop, EVENTUALLY_S)
    line = f"Ray's raylet, process {raylet.pid}, was ended by SIGKILL"
    assert caught.value.message == line
    assert raylet.wait() == -signal.SIGKILL  # its owner still learns it


def test_a_process_that_ends_by_itself_has_an_exit_code_and_the_others_are_paused(start, stop):
    gcs, server = start("/ray/gcs/gcs_server"), start(f"python -m {SERVER_MODULE}")
    processes = Processes({}, pytest.fail)
    gcs.stdin.close()
    with pytest.raises(ServiceEndedError, match=f"gcs_server, process {gcs.pid}, ended .* 3$"):
        processes.look(stop, EVENTUALLY_S)
    is_stopped = lambda: psutil.Process(server.pid).status() == psutil.STATUS_STOPPED  # noqa: E731
    wait_until(is_stopped, EVENTUALLY_S, "the fork server is stopped")


def test_without_pidfds_it_is_told_as_well(start, stop, monkeypatch):
    monkeypatch.setattr(supervisor, "_pidfd", lambda _: None)
    raylet = start(RAYLET)
    processes = Processes({}, pytest.fail)
    processes.look(stop, 0)
    raylet.kill()
    os.waitid(os.P_PID, raylet.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(ServiceEndedError, match="SIGKILL"):
        processes.look(stop, 0)


OF_ANOTHER = """
import subprocess, sys
child = subprocess.Popen(["ray::DashboardAgent", "600"], executable="sleep")
print(child.pid, flush=True)
child.wait()
sys.stdin.read()
"""


def test_without_waitid_nobody_knows_how_it_ended(start, stop, monkeypatch):
    """As with Python 3.11 on macOS."""
    monkeypatch.delattr(os, "waitid")
    raylet = start(RAYLET)
    processes = Processes({}, pytest.fail)
    processes.look(stop, 0)
    raylet.kill()
    with pytest.raises(ServiceEndedError, match=f"raylet, process {raylet.pid}, ended"):
        processes.look(stop, EVENTUALLY_S)


def test_how_a_process_of_another_ended_is_not_known(stop):
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", OF_ANOTHER], stdin=pipe, stdout=pipe) as parent:
        pid = int(parent.stdout.readline())
        processes = Processes({}, pytest.fail)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ServiceEndedError) as caught:
            processes.look(stop, EVENTUALLY_S)
        assert caught.value.message == f"Ray's DashboardAgent, process {pid}, ended"
        parent.stdin.close()


def test_a_fork_has_the_fork_servers_command_line_at_first_and_is_none(start, stop):
    """Nor is what an agent starts an agent."""
    for title in (f"python -m {SERVER_MODULE}", RAYLET, "ray::RuntimeEnvAgent"):
        code = OF_ANOTHER.replace("ray::DashboardAgent", title)
        pipe = subprocess.PIPE
        with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe) as parent:
            pid = int(parent.stdout.readline())
            titles: dict[int, str] = {}
            processes = Processes(titles, pytest.fail)
            os.kill(pid, signal.SIGKILL)
            expected = pytest.raises(ServiceEndedError) if "Agent" in title else nullcontext()
            with expected:
                processes.look(stop, 0.05)
            parent.stdin.close()


@pytest.mark.parametrize("file", ["memory__events", "memory__oom_control"])
def test_the_kernels_out_of_memory_killer_is_named(start, stop, monkeypatch, tmp_path, file):
    files = CgroupFiles(tmp_path / "groups")
    if file == "memory__events":
        files.mount_v2("/tandem")
    else:
        files.mount_v1("memory", "/tandem")
    hierarchy = "v2" if file == "memory__events" else "memory"
    count = lambda number: files.set(hierarchy, "/tandem", **{file: f"a 1\noom_kill {number}"})  # noqa: E731
    count(2)
    monkeypatch.setattr(supervisor, "num_oom_kills", partial(num_oom_kills, files.proc))
    lines: list[str] = []
    raylet = start(RAYLET)
    processes = Processes({}, lines.append)
    processes.look(stop, 0)
    count(3)
    processes.look(stop, 0)
    processes.look(stop, 0)
    assert lines == [OUT_OF_MEMORY]  # of a replica, which Serve replaces
    count(4)
    raylet.kill()
    with pytest.raises(ServiceEndedError, match=r"SIGKILL \(memory ran out"):
        processes.look(stop, EVENTUALLY_S)


def test_a_system_without_groups_of_memory(tmp_path):
    assert num_oom_kills(tmp_path) == 0
    files = CgroupFiles(tmp_path / "groups")
    files.mount_v1("memory", "/tandem")
    files.set("memory", "/tandem", memory__oom_control="oom_kill_disable 0")  # Linux 4.12
    assert num_oom_kills(files.proc) == 0


def test_an_haproxy_that_ends_is_told_and_one_that_was_replaced_is_not(start, stop):
    lines: list[str] = []
    titles: dict[int, str] = {}
    old = start("haproxy", "haproxy")
    processes = Processes(titles, lines.append)
    new = start("haproxy", "haproxy")
    old.kill()
    processes.look(stop, EVENTUALLY_S)
    assert (lines, titles[new.pid]) == ([], "HAProxy")
    new.kill()
    processes.look(stop, EVENTUALLY_S)
    assert lines == [f"HAProxy, process {new.pid}, was ended by SIGKILL; Serve starts another one"]


ADOPTED = """
import os, subprocess, psutil
from app.launch import supervisor
from app.launch.ray_cluster import StopRequest, _stop_ray
supervisor.adopt_orphans()
started = subprocess.run(["sh", "-c", "sleep 600 >&- 2>&- & echo $!"], stdout=subprocess.PIPE)
orphan = psutil.Process(int(started.stdout))
assert orphan.ppid() == os.getpid(), orphan.ppid()
processes = supervisor.Processes({}, print)
orphan.kill()
os.waitid(os.P_PID, orphan.pid, os.WEXITED | os.WNOWAIT)
processes.look(StopRequest(), 0)
assert not psutil.pid_exists(orphan.pid), "a zombie is left"
subprocess.run(["sh", "-c", "sleep 600 >&- 2>&- & sleep 600 >&- 2>&- &"])
_stop_ray(None, in_order=False)
assert psutil.Process().children() == []
"""


@pytest.mark.slow  # a process of its own, which imports the launch: it must stay the parent of all
def test_a_process_whose_parent_has_ended_is_not_lost():
    done = subprocess.run([sys.executable, "-c", ADOPTED], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def fast(monkeypatch):
    """No waiting: a look follows the other."""
    monkeypatch.setattr(supervisor, "LOOK_EVERY_S", 0.001)
    monkeypatch.setattr(supervisor, "ASK_EVERY_S", 0.001)


class FakeHaproxy:
    """Remembers that it was drained, and until when it follows the keys."""

    drained_s: float | None = None
    follows_until: Event | None = None

    def drain(self, within_s: float) -> None:
        self.drained_s = within_s

    def follow_keys(self, over: Event) -> None:
        self.follows_until = over


class FakeProcesses:
    """All of which live; sets ``stop`` at the look ``last``."""

    def __init__(self, last: int) -> None:
        self.num_looks, self._last = 0, last

    def refresh(self) -> None:
        pass

    def look(self, stop: StopRequest, timeout_s: float) -> None:
        self.num_looks += 1
        if self.num_looks == self._last:
            stop.set()
        stop.wait(timeout_s)


def run(readiness: Readiness, last: int = -1) -> tuple[Any, Any]:
    processes: Any = FakeProcesses(last)
    haproxy: Any = FakeHaproxy()
    supervise(StopRequest(), processes, readiness, haproxy)
    return processes, haproxy


def test_a_request_to_stop_ends_the_watch(fast):
    processes, haproxy = run(Readiness(lambda: "", pytest.fail), last=3)
    assert (processes.num_looks, haproxy.drained_s) == (3, None)
    assert haproxy.follows_until.is_set()


def test_a_service_that_stays_unready_is_ended_after_it_answered_what_it_accepted(fast):
    processes: Any = FakeProcesses(-1)
    haproxy: Any = FakeHaproxy()
    readiness = Readiness(lambda: "status 503", lambda: False)
    with pytest.raises(ServiceEndedError, match=r"/readyz has failed for .* s \(status 503\)"):
        supervise(StopRequest(), processes, readiness, haproxy)
    assert processes.num_looks == supervisor.UNREADY_LOOKS + 1
    assert haproxy.drained_s == supervisor.DRAINS_WITHIN_S


def test_a_replica_that_starts_has_longer_and_not_for_ever():
    readiness = Readiness(lambda: "", lambda: True)  # not asked: as if no answer came
    for number in range(supervisor.STARTING_LOOKS):
        readiness.look()
        assert readiness.waits == (number >= supervisor.UNREADY_LOOKS)
    with pytest.raises(ServiceEndedError, match="no answer"):
        readiness.look()


def test_what_goes_wrong_while_it_asks_is_a_reason_and_it_asks_again(fast):
    answers: Iterator[Any] = iter([*5 * [ValueError("bad")], *1000 * ["ReadTimeout"]])

    def ask() -> str:
        if isinstance(answer := next(answers), Exception):
            raise answer
        return str(answer)

    with pytest.raises(ServiceEndedError, match="ReadTimeout"):
        run(Readiness(ask, lambda: False))


def test_what_a_signal_to_all_processes_ends_is_no_fault(start):
    raylet, stop = start(RAYLET), StopRequest()
    processes = Processes({}, pytest.fail)
    stop.set()
    raylet.kill()
    raylet.wait()
    processes.look(stop, 0)


def test_an_answer_between_failures_starts_the_count_anew(fast):
    answers = iter([*10 * ["ReadTimeout"], "", *1000 * ["ReadTimeout"]])
    with pytest.raises(ServiceEndedError) as caught:
        run(Readiness(lambda: next(answers), lambda: False))
    assert "ReadTimeout" in caught.value.message
    assert next(answers, None) is not None  # 60 looks after the answer, not before


@pytest.mark.parametrize(
    ("status", "reason"), [(200, ""), (429, ""), (503, "status 503"), (None, "ConnectError")]
)
def test_a_full_service_is_ready(status, reason):
    def answer(request: httpx.Request) -> httpx.Response:
        if status is None:
            raise httpx.ConnectError("nobody", request=request)
        return httpx.Response(status)

    with httpx.Client(base_url="http://x", transport=httpx.MockTransport(answer)) as client:
        assert ask_of(client) == reason


@pytest.fixture
def systemd(tmp_path, monkeypatch) -> Iterator[Callable[[], list[bytes]]]:
    """Return what was received so far."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.setblocking(False)
        receiver.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))

        def received() -> list[bytes]:
            texts = []
            while True:
                try:
                    texts.append(receiver.recv(100))
                except BlockingIOError:
                    return texts

        yield received


def test_systemd_is_told_the_state_once_and_the_watchdog_while_it_is_ready(
    fast, systemd, monkeypatch
):
    monkeypatch.setenv("WATCHDOG_USEC", "2000")
    told: list[bytes] = []

    def ask() -> str:
        told.extend(systemd())
        return "status 503" if told.count(b"WATCHDOG=1") > 1 else ""

    with pytest.raises(ServiceEndedError):
        run(Readiness(ask, lambda: False))
    told += systemd()
    assert told[0] == b"STATUS=ready"
    assert told[-2:] == [b"STATUS=not ready: status 503", b"STOPPING=1"]
    assert set(told[1:-2]) == {b"WATCHDOG=1"}


def test_without_a_watchdog_none_is_fed(fast, systemd, monkeypatch):
    monkeypatch.delenv("WATCHDOG_USEC", raising=False)
    run(Readiness(lambda: "", pytest.fail), last=5)
    assert systemd() == [b"STATUS=ready"]


@pytest.mark.parametrize("is_abstract", [False, True])
def test_the_state_arrives(tmp_path, monkeypatch, is_abstract):
    """Nobody who waits is no error."""
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    supervisor.notify_systemd("READY=1")
    path = str(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", f"@{path}" if is_abstract else path)
    supervisor.notify_systemd("READY=1")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.settimeout(30)
        systemd.bind(f"\0{path}" if is_abstract else path)
        supervisor.notify_systemd("READY=0")
        assert systemd.recv(100) == b"READY=0"
