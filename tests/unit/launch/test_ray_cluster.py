"""A Ray of our own or of others: started, joined, left; what the user is told, what a signal does.

tests/integration/test_shared_serve.py deploys beside the applications of others and takes ours
back.
"""

import math
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import ray
from ray._private import worker

from app.errors import ConfigError, NotReadyError
from app.launch import ray_cluster
from app.stages.threads import Limit
from tests.support.cases import cases
from tests.support.certificates import Root

ROOT = Path(__file__).parents[3]
FOLDER = Path("/tmp/of-this-run")
LATE = "The current node timed out during startup. This could happen because some of the raylet"


class Forks:
    """In the place of the fork server."""

    was_asked_to_end = False

    def ask(self) -> None:
        self.was_asked_to_end = True


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> Forks:
    monkeypatch.setattr(ray_cluster, "only_what_one_machine_needs", lambda _: nullcontext())
    monkeypatch.setattr(ray_cluster, "ask_to_end", Forks.ask)
    return Forks()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options with which Ray was started, in its place, and the working folder then."""
    starts: list[dict[str, Any]] = []
    init = lambda **options: starts.append(options | {"folder": Path.cwd()})  # noqa: E731
    monkeypatch.setattr(ray_cluster, "init_ray", init)
    return starts


def raising(error: BaseException, calls: list[int] | None = None) -> Callable[..., None]:
    def init(**_: object) -> None:
        if calls is not None:
            calls.append(1)
        raise error

    return init


@pytest.mark.parametrize(
    ("place", "said"),
    [("tightest_pids_limit", r"pids\.max, 300, leaves 60"), ("user_limit", "-u, 300, leaves 60")],
)
def test_a_limit_of_processes_below_what_ray_needs(monkeypatch, place, said):
    monkeypatch.setattr(ray_cluster, "tightest_pids_limit", lambda: Limit(math.inf, 0))
    monkeypatch.setattr(ray_cluster, "user_limit", lambda: Limit(math.inf, 0))
    ray_cluster.check_processes()
    monkeypatch.setattr(ray_cluster, place, lambda: Limit(300, 240))
    with pytest.raises(ConfigError, match=said):
        ray_cluster.check_processes()
    monkeypatch.setattr(ray_cluster, place, lambda: Limit(240 + ray_cluster.MIN_PROCESSES, 240))
    ray_cluster.check_processes()


@cases(
    "soft, hard, raised",
    (64, 64, None),
    (64, 256, 256),
    (1024, 2**20, 65_536),
    (2**20, 2**20, ()),
    (64, resource.RLIM_INFINITY, 65_536),
    (resource.RLIM_INFINITY, resource.RLIM_INFINITY, ()),
)
def test_the_limit_of_open_files_is_raised_or_told(monkeypatch, soft, hard, raised):
    told = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda *args: told.append(args))
    if raised is None:
        with pytest.raises(ConfigError, match=r"need 256 open .*-Hn is 64: raise it .*ulimit -n"):
            ray_cluster.raise_file_limit()
    else:
        ray_cluster.raise_file_limit()
        assert told == ([(resource.RLIMIT_NOFILE, (raised, hard))] if raised else [])


def test_without_shared_memory_rays_object_store_is_in_the_runs_folder(monkeypatch, started):
    for memory, asked in ((Path("/nowhere"), str(FOLDER)), (FOLDER.parent, None)):
        monkeypatch.setattr(ray_cluster, "FOLDER", memory)
        with ray_cluster.local_ray(0, None, FOLDER / "ray", print, {}):
            pass
        assert started.pop().get("_plasma_directory") == asked


DEATH = """A worker died or was killed while executing a task by an unexpected system error. To \
troubleshoot the problem, check the logs for the dead worker. Lease ID: 0a Worker ID: 1b Node ID: \
2c Worker IP address: 127.0.0.1 Worker port: 37105 Worker PID: 4711 Worker exit type: SYSTEM_ERROR \
Worker exit detail: Worker unexpectedly exits with a connection error code 2. End of file. Some \
common causes include: (1) the process was killed by the OOM killer due to high memory usage."""
TOLD = (
    "ray::ProxyActor of Ray, process 4711, died: Worker unexpectedly exits with a connection error "
    "code 2; Serve starts another one"
)


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
    ("text", "line"),
    [(DEATH, TOLD), ("Something else.\nIt goes on.", "Something else"), ("x" * 900, "x" * 200)],
)
@pytest.mark.usefixtures("started")
def test_a_process_of_rays_that_died_is_told_in_a_line(monkeypatch, capfd, forks, text, line):
    """By Ray's own listener, which prints to the terminal."""
    monkeypatch.setattr(worker, "_internal_kv_initialized", lambda: False)
    job = SimpleNamespace(binary=lambda: b"job")
    listening: Any = SimpleNamespace(gcs_error_subscriber=OneError(text), current_job_id=job)
    lines: list[str] = []
    with ray_cluster.local_ray(0, forks, FOLDER, lines.append, {4711: "ray::ProxyActor"}):
        worker.listen_error_messages(listening, threading.Event())
    assert lines == [line]
    assert text[:9] not in "".join(capfd.readouterr())


def test_the_metrics_of_each_node_that_is_alive(monkeypatch):
    nodes = [
        {"Alive": is_alive, "NodeManagerAddress": address, "MetricsExportPort": 9464}
        for address, is_alive in (("10.0.0.1", True), ("10.0.0.2", False), ("fd00::5", True))
    ]
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    urls = ["http://10.0.0.1:9464/metrics", "http://[fd00::5]:9464/metrics"]
    assert ray_cluster.metrics_urls() == urls


@pytest.mark.parametrize(
    ("error", "raised", "says"),
    [
        (Exception(LATE), NotReadyError,
         r"^Ray did not start: The current node timed out during startup\. Much else.* try again$"),
        *((error, NotReadyError, "^((?!try again).)*$") for error in (  # no time ran out
            PermissionError(13, "Permission denied", "/tmp/x"), OSError("no space"), ValueError(),
        )),
        (ConfigError("ours"), ConfigError, "^ours$"),
        (KeyboardInterrupt(), KeyboardInterrupt, None),
    ],
)  # fmt: skip
def test_what_ray_raises_is_told_in_a_line(monkeypatch, forks, error, raised, says):
    monkeypatch.setattr(ray_cluster, "init_ray", raising(error))
    with pytest.raises(raised, match=says), ray_cluster.local_ray(0, forks, FOLDER, print, {}):
        pass
    assert forks.was_asked_to_end


@pytest.mark.usefixtures("started")
def test_what_fails_once_it_runs_is_not_the_start(forks):
    with (
        pytest.raises(ValueError, match="later"),
        ray_cluster.local_ray(0, forks, FOLDER, print, {}),
    ):
        raise ValueError("later")


def test_ray_is_started_and_joined_from_the_projects_own_folder(
    monkeypatch, forks, started, tmp_path
):
    """Its workers import from there first: not another program's "app" of a working folder."""
    monkeypatch.setattr(ray_cluster, "check_address", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    with ray_cluster.local_ray(0, forks, FOLDER, print, {}), ray_cluster.joined_ray("auto"):
        assert Path.cwd() == tmp_path
    assert [options["folder"] for options in started] == [ROOT, ROOT]
    assert started[0]["_temp_dir"] == str(FOLDER)


@pytest.mark.usefixtures("started")
def test_a_working_folder_that_is_gone_stops_nothing(monkeypatch, forks, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gone").mkdir()
    os.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with ray_cluster.local_ray(0, forks, FOLDER, print, {}):
        pass


def test_without_a_fork_server_ray_starts_workers_as_it_does(started):
    with ray_cluster.local_ray(0, None, FOLDER, print, {}):
        pass
    assert "_system_config" not in started[0]


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where somebody listens, as a cluster's head does, who says nothing."""
    monkeypatch.setattr(ray_cluster, "ANSWERS_HTTP2_WITHIN_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a cluster is asked to do, in its place."""
    asked: list[str] = []
    monkeypatch.setattr(ray, "init", lambda address, **_: asked.append(f"join {address}"))
    monkeypatch.setattr(ray, "shutdown", lambda: asked.append("leave"))
    return asked


@pytest.mark.parametrize("error", [None, KeyError()])
def test_a_cluster_is_joined_and_left(calls, head, error):
    ray_cluster.check_address(head)  # where somebody listens
    ray_cluster.check_address(f"ray://{head}", may_be_client=True)
    with nullcontext() if error is None else pytest.raises(KeyError), ray_cluster.joined_ray(head):
        assert calls == [f"join {head}"]
        if error is not None:
            raise error
    assert calls[1:] == ["leave"]


DIED = "Initialization failure from server:\nTraceback\nRuntimeError: it has ended"


@cases(
    "error, says, attempts",
    (ConnectionError("refused"), r"no Ray cluster at \S+: refused; .*ray start", 1),
    (ConnectionError(DIED), r"no Ray cluster at \S+: RuntimeError: it has ended; st", None),
    (RuntimeError("Version mismatch"), r"cannot join .* at \S+: Version mismatch", 1),
)
def test_a_cluster_that_is_not_joined(monkeypatch, head, error, says, attempts):
    calls: list[int] = []
    monkeypatch.setattr(ray, "init", raising(error, calls))
    with pytest.raises(ConfigError, match=says), ray_cluster.joined_ray(head):
        pass
    assert len(calls) == (attempts or ray_cluster.MAX_ATTEMPTS)


def test_a_process_for_the_client_that_died_at_its_start_is_asked_for_again(
    monkeypatch, calls, head
):
    def init(**_: object) -> None:
        calls.append("join")
        if len(calls) < 3:
            raise ConnectionError(DIED)

    monkeypatch.setattr(ray, "init", init)
    with ray_cluster.joined_ray(head):
        assert len(calls) == 3


@pytest.mark.parametrize(
    ("address", "may_be_client", "says"),
    [
        *((address, False, r"--address .* is no address; give auto, or HOST:PORT")
          for address in ("foo", "ray://head:10001", "http://head:8265", "head:", ":1")),
        ("foo", True, r"foo is no address; .*, or ray://HOST:10001 from"),
        ("127.0.0.1:99999", False, r"no Ray cluster at 127\.0\.0\.1:99999"),
        ("127.0.0.1:1", False,
         "^no Ray cluster at 127.0.0.1:1: Connection refused; start one with ray start --head"),
    ],
)  # fmt: skip
def test_what_is_no_address(address: str, may_be_client: bool, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ray_cluster.check_address(address, may_be_client)


@pytest.mark.parametrize("ours", ["clear", "root", "other"])
@pytest.mark.parametrize("theirs", ["clear", "root"])
def test_a_cluster_with_another_tls_is_refused_at_once(monkeypatch, tmp_path, root, theirs, ours):
    """Ray itself waits a minute or more, and blames the address."""
    node = root.sign("node")
    own = (Root(tmp_path) if ours == "other" else root).sign("own")
    pair = (node.key.read_bytes(), node.certificate.read_bytes())
    needed = grpc.ssl_server_credentials([pair], root.path.read_bytes(), require_client_auth=True)
    server, address = grpc.server(ThreadPoolExecutor(1)), "127.0.0.1:0"
    if theirs == "clear":
        port = server.add_insecure_port(address)
    else:
        port = server.add_secure_port(address, needed)
    server.start()
    files = {"CA_CERT": root.path, "SERVER_CERT": own.certificate, "SERVER_KEY": own.key}
    for name, path in files.items():
        monkeypatch.setenv(f"RAY_TLS_{name}", str(path))
    monkeypatch.setenv("RAY_USE_TLS", str(int(ours != "clear")))
    refused = pytest.raises(ConfigError, match="other TLS than this command's")
    with nullcontext() if theirs == ours else refused:
        ray_cluster.check_address(f"127.0.0.1:{port}")
    server.stop(None).wait()


def test_auto_is_the_last_cluster_which_may_be_gone(monkeypatch, tmp_path):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    ray_cluster.check_address("auto")  # there was none: Ray itself says so
    gone = "127.0.0.1:1"
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text(gone)
    with pytest.raises(ConfigError, match=f"no Ray cluster at {gone}"):
        ray_cluster.check_address("auto")
    monkeypatch.setenv("RAY_ADDRESS", "nonsense")
    with pytest.raises(ConfigError, match="--address auto: nonsense is no address"):
        ray_cluster.check_address("auto")


def test_a_neighbours_note_of_a_cluster_is_not_followed(
    shared_place, neighbour, monkeypatch, calls, head
):
    """Whoever joins a cluster runs what is sent from there. Ray itself would read it again."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(shared_place))
    neighbour(f"mkdir -m 777 ray; echo {head} > ray/ray_current_cluster")
    with pytest.raises(ConfigError, match=r"another user's \(uid 65534\); give HOST:PORT"):
        ray_cluster.check_address("auto")
    neighbour("rm ray/ray_current_cluster")
    (shared_place / "ray" / "ray_current_cluster").write_text(head)
    with ray_cluster.joined_ray("auto"):
        assert calls == [f"join {head}"]


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
def _same_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in ray_cluster.SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_same_handlers")
@cases(
    "number, is_ignored, is_ours",
    *((number, False, True) for number in ray_cluster.SIGNALS),
    (signal.SIGHUP, True, False),  # as nohup has it
    (signal.SIGINT, True, True),  # a script's "&" ignores it, which "kill" may send after all
    (signal.SIGTERM, True, True),
)
def test_each_asks_and_has_its_handler_back_afterwards(number, is_ignored, is_ours):
    if is_ignored:
        signal.signal(number, signal.SIG_IGN)
    before = signal.getsignal(number)
    with ray_cluster.stop_signals() as stop:
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        assert stop.wait(10 if is_ours else 0.01) is is_ours
    assert signal.getsignal(number) == before


def test_a_signal_ends_what_hears_none() -> None:
    command, pipe = [sys.executable, "-c", CONNECTING], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout.readline() == "connecting\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert process.stderr.read() == "the last word\n"


def test_a_signal_at_any_line_of_a_wait_or_of_another_signal() -> None:
    command = [sys.executable, "-c", AT_EACH_LINE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout == "True\n"


def test_a_wait_ends_with_its_time_or_with_the_signal() -> None:
    with ray_cluster.stop_signals() as stop:
        assert not stop.wait(0.01)
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
        assert stop.wait()
        assert stop.wait(0.01)  # it stays set
