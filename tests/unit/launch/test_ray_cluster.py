"""A Ray of our own or of others: started, joined, left; what the user is told, what a signal does.

tests/integration/test_shared_serve.py deploys beside the applications of others and takes ours
back.
"""

import math
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray._private import worker

from app.errors import ConfigError, NotReadyError
from app.launch import ray_cluster
from app.launch.ray_cluster import (
    MAX_ATTEMPTS,
    MIN_PROCESSES,
    SIGNALS,
    check_address,
    check_processes,
    joined_ray,
    local_ray,
    metrics_urls,
    stop_signals,
)
from app.stages.threads import Limit

ROOT = Path(__file__).parents[3]
FOLDER = Path("/tmp/of-this-run")
LATE = "The current node timed out during startup. This could happen because some of the raylet"


class Forks:
    """In the place of the fork server."""

    def __init__(self) -> None:
        self.was_asked_to_end = False

    def ask(self) -> None:
        self.was_asked_to_end = True


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> Forks:
    monkeypatch.setattr(ray_cluster, "only_what_one_machine_needs", lambda _: nullcontext())
    monkeypatch.setattr(ray_cluster, "ask_to_end", Forks.ask)
    return Forks()


def fails(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def init(**_: object) -> None:
        raise error

    monkeypatch.setattr(ray_cluster, "init_ray", init)


@pytest.mark.parametrize(
    ("place", "said"),
    [("tightest_pids_limit", r"pids\.max, 300, leaves 60"), ("user_limit", "-u, 300, leaves 60")],
)
def test_a_limit_of_processes_below_what_ray_needs(monkeypatch, place, said):
    monkeypatch.setattr(ray_cluster, "tightest_pids_limit", lambda: Limit(math.inf, 0))
    monkeypatch.setattr(ray_cluster, "user_limit", lambda: Limit(math.inf, 0))
    check_processes()
    monkeypatch.setattr(ray_cluster, place, lambda: Limit(300, 240))
    with pytest.raises(ConfigError, match=said):
        check_processes()
    monkeypatch.setattr(ray_cluster, place, lambda: Limit(240 + MIN_PROCESSES, 240))
    check_processes()


DEATH = """A worker died or was killed while executing a task by an unexpected system error. To \
troubleshoot the problem, check the logs for the dead worker. Lease ID: 0a Worker ID: 1b Node ID: \
2c Worker IP address: 127.0.0.1 Worker port: 37105 Worker PID: 4711 Worker exit type: SYSTEM_ERROR \
Worker exit detail: Worker unexpectedly exits with a connection error code 2. End of file. Some \
common causes include: (1) the process was killed by the OOM killer due to high memory usage."""


class OneError:
    """Publishes one error, as Ray's control store does, then nothing."""

    def __init__(self, text: str) -> None:
        self.errors = [{"job_id": None, "error_message": text}]

    def subscribe(self) -> None:
        pass

    def poll(self) -> tuple[None, dict[str, str | None]]:
        if not self.errors:
            raise ConnectionError("over")
        return None, self.errors.pop()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            DEATH,
            "process 4711 of Ray died: Worker unexpectedly exits with a connection error code 2; "
            "of a replica Serve starts another one",
        ),
        ("Something else.\nIt goes on.", "Something else"),
        ("x" * 900, "x" * 200),
    ],
)
def test_a_process_of_rays_that_died_is_told_in_a_line(monkeypatch, capfd, forks, text, told):
    """By Ray's own listener, which prints to the terminal."""
    monkeypatch.setattr(ray_cluster, "init_ray", lambda **_: None)
    monkeypatch.setattr(worker, "_internal_kv_initialized", lambda: False)
    job = SimpleNamespace(binary=lambda: b"job")
    listening = SimpleNamespace(gcs_error_subscriber=OneError(text), current_job_id=job)
    lines: list[str] = []
    with local_ray(0, forks, FOLDER, lines.append):
        worker.listen_error_messages(listening, threading.Event())  # type: ignore[arg-type]
    assert lines == [told]
    assert text[:9] not in "".join(capfd.readouterr())


def test_the_metrics_of_each_node_that_is_alive(monkeypatch):
    nodes = [
        {"Alive": is_alive, "NodeManagerAddress": address, "MetricsExportPort": 9464}
        for address, is_alive in (("10.0.0.1", True), ("10.0.0.2", False), ("fd00::5", True))
    ]
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    assert metrics_urls() == ["http://10.0.0.1:9464/metrics", "http://[fd00::5]:9464/metrics"]


def test_what_ray_raises_is_told_in_a_line(monkeypatch, forks):
    fails(monkeypatch, Exception(LATE))
    told = (
        r"^Ray did not start: The current node timed out during startup\. Much else .* try again$"
    )
    with pytest.raises(NotReadyError, match=told), local_ray(0, forks, FOLDER, print):
        pass
    assert forks.was_asked_to_end


@pytest.mark.parametrize(
    "error",
    [PermissionError(13, "Permission denied", "/tmp/x"), OSError("no space left"), ValueError()],
)
def test_a_busy_machine_is_blamed_only_where_a_time_ran_out(monkeypatch, forks, error):
    fails(monkeypatch, error)
    with pytest.raises(NotReadyError) as caught, local_ray(0, forks, FOLDER, print):
        pass
    assert "try again" not in caught.value.message


def test_rays_files_are_in_the_folder_of_the_run(monkeypatch, forks):
    options = {}
    monkeypatch.setattr(ray_cluster, "init_ray", lambda **given: options.update(given))
    with local_ray(0, forks, FOLDER, print):
        assert options["_temp_dir"] == str(FOLDER)


@pytest.mark.parametrize("error", [ConfigError("ours"), KeyboardInterrupt()])
def test_what_is_told_already_and_ctrl_c_stay_what_they_are(monkeypatch, forks, error):
    fails(monkeypatch, error)
    with pytest.raises(type(error)), local_ray(0, forks, FOLDER, print):
        pass
    assert forks.was_asked_to_end


def test_what_fails_once_it_runs_is_not_the_start(monkeypatch, forks):
    monkeypatch.setattr(ray_cluster, "init_ray", lambda **_: None)
    with pytest.raises(ValueError, match="later"), local_ray(0, forks, FOLDER, print):
        raise ValueError("later")


def test_ray_is_started_and_joined_from_the_projects_own_folder(monkeypatch, forks, tmp_path):
    """Its workers import from there first: not another program's "app" of a working folder."""
    folders = []
    monkeypatch.setattr(ray_cluster, "init_ray", lambda **_: folders.append(Path.cwd()))
    monkeypatch.setattr(ray_cluster, "check_address", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    with local_ray(0, forks, FOLDER, print), joined_ray("auto"):
        assert Path.cwd() == tmp_path
    assert folders == [ROOT, ROOT]


def test_a_working_folder_that_is_gone_stops_nothing(monkeypatch, forks, tmp_path):
    monkeypatch.setattr(ray_cluster, "init_ray", lambda **_: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gone").mkdir()
    os.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with local_ray(0, forks, FOLDER, print):
        pass


def test_without_a_fork_server_ray_starts_workers_as_it_does(monkeypatch):
    started = []
    monkeypatch.setattr(ray_cluster, "init_ray", lambda **options: started.append(options))
    with local_ray(0, None, FOLDER, print):
        pass
    assert "_system_config" not in started[0]


@pytest.fixture
def head() -> Iterator[str]:
    """Where somebody listens, as a cluster's head does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a cluster is asked to do, in its place."""
    asked: list[str] = []
    monkeypatch.setattr(ray, "init", lambda address, **_: asked.append(f"join {address}"))
    monkeypatch.setattr(ray, "shutdown", lambda: asked.append("leave"))
    return asked


def test_a_cluster_is_joined_and_left(calls: list[str], head: str) -> None:
    with joined_ray(head):
        assert calls == [f"join {head}"]
    assert calls[1:] == ["leave"]


def test_an_error_meanwhile_leaves_it_too(calls: list[str], head: str) -> None:
    with pytest.raises(KeyError), joined_ray(head):
        raise KeyError
    assert calls[1:] == ["leave"]


DIED = "Initialization failure from server:\nTraceback\nRuntimeError: it has ended"


@pytest.mark.parametrize(
    ("error", "says", "attempts"),
    [
        (ConnectionError("refused"), r"no Ray cluster at \S+: refused; .*ray start", 1),
        (ConnectionError(DIED), r"no Ray cluster at \S+: RuntimeError: it has ended; st", None),
        (RuntimeError("Version mismatch"), r"cannot join .* at \S+: Version mismatch", 1),
    ],
)
def test_a_cluster_that_is_not_joined(
    monkeypatch: pytest.MonkeyPatch, head: str, error: Exception, says: str, attempts: int | None
) -> None:
    asked = []

    def init(**_: object) -> None:
        asked.append(1)
        raise error

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ConfigError, match=says), joined_ray(head):
        pass
    assert len(asked) == (attempts or MAX_ATTEMPTS)


def test_a_process_for_the_client_that_died_at_its_start_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, calls: list[str], head: str
) -> None:
    def init(**_: object) -> None:
        calls.append("join")
        if len(calls) < 3:
            raise ConnectionError(DIED)

    monkeypatch.setattr(ray, "init", init)
    with joined_ray(head):
        assert len(calls) == 3


@pytest.mark.parametrize(("scheme", "may_be_client"), [("", False), ("ray://", True)])
def test_somebody_listens(head: str, scheme: str, may_be_client: bool) -> None:
    check_address(f"{scheme}{head}", may_be_client)


def test_nobody_listens(free_port: Callable[[], int]) -> None:
    address = f"127.0.0.1:{free_port()}"
    told = f"^no Ray cluster at {address}: Connection refused; start one with ray start --head"
    with pytest.raises(ConfigError, match=told):
        check_address(address)


NO_ADDRESS = r"--address .* is no address; give auto, or HOST:PORT"


@pytest.mark.parametrize(
    ("address", "may_be_client", "says"),
    [
        ("foo", False, NO_ADDRESS),
        ("ray://head:10001", False, NO_ADDRESS),
        ("http://head:8265", False, NO_ADDRESS),
        ("head:", False, NO_ADDRESS),
        (":1", False, NO_ADDRESS),
        ("foo", True, r"foo is no address; .*, or ray://HOST:10001 from"),
        ("127.0.0.1:99999", False, r"no Ray cluster at 127\.0\.0\.1:99999"),
    ],
)
def test_what_is_no_address(address: str, may_be_client: bool, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_address(address, may_be_client)


def test_auto_is_the_last_cluster_which_may_be_gone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    check_address("auto")  # there was none: Ray itself says so
    gone = f"127.0.0.1:{free_port()}"
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text(gone)
    with pytest.raises(ConfigError, match=f"no Ray cluster at {gone}"):
        check_address("auto")
    monkeypatch.setenv("RAY_ADDRESS", "nonsense")
    with pytest.raises(ConfigError, match="--address auto: nonsense is no address"):
        check_address("auto")


# Python's own handler runs only between two steps of Python: here there is none.
CONNECTING = """
import ctypes, signal
from app.launch.ray_cluster import ending_on_signal
signal.signal(signal.SIGINT, lambda *_: None)
with ending_on_signal("before"):
    pass
with ending_on_signal("the last word"):
    print("connecting", flush=True)
    while True:
        ctypes.CDLL(None).sleep(60)
"""

# Python may run a handler before any line of the main thread, those of a wait included.
AT_EACH_LINE = """
import signal, sys
from app.launch.ray_cluster import stop_signals
with stop_signals() as stop:
    handler = signal.getsignal(signal.SIGTERM)
    def trace(*_):
        handler(signal.SIGTERM, None)
        return trace
    sys.settrace(trace)
    stop.wait(1)
    handler(signal.SIGTERM, None)
    sys.settrace(None)
    print(stop.is_set())
"""


@pytest.fixture
def same_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("same_handlers")
@pytest.mark.parametrize("number", SIGNALS)
def test_each_asks_and_has_its_handler_back_afterwards(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with stop_signals() as stop:
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        assert stop.wait(10)
    assert signal.getsignal(number) == before


@pytest.mark.usefixtures("same_handlers")
@pytest.mark.parametrize(
    ("number", "is_ours"), [(signal.SIGHUP, False), (signal.SIGINT, True), (signal.SIGTERM, True)]
)
def test_a_hang_up_that_was_ignored_is_not_ours(number: signal.Signals, is_ours: bool) -> None:
    """``nohup`` ignores it; a script's ``&`` ignores SIGINT, which ``kill`` may send after all."""
    signal.signal(number, signal.SIG_IGN)
    with stop_signals() as stop:
        os.kill(os.getpid(), number)
        assert stop.is_set() is is_ours
    assert signal.getsignal(number) is signal.SIG_IGN


def test_a_signal_ends_what_hears_none() -> None:
    command = [sys.executable, "-c", CONNECTING]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline() == "connecting\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert process.stderr.read() == "the last word\n"


def test_a_signal_at_any_line_of_a_wait_or_of_another_signal() -> None:
    command = [sys.executable, "-c", AT_EACH_LINE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout == "True\n"


def test_a_wait_ends_with_its_time_or_with_the_signal() -> None:
    with stop_signals() as stop:
        assert not stop.wait(0.01)
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
        assert stop.wait()
        assert stop.wait(0.01)  # it stays set
