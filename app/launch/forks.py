"""The fork server: imports the modules of Ray's processes once, then forks for each of them.

``python -P -m app.launch.forks LISTENER MODULES``: the listener is a file descriptor, the modules
are separated by commas. None of them may be Ray's: its library seeds its random numbers and reads
the process's identity at import.

The server has one Python thread and starts no other processes, so a fork equals an interpreter that
has just imported the modules. It ends when its standard input is closed, since Ray has ended then.
Forks that still run after ``FORKS_END_WITHIN_S`` are killed.
"""

import contextlib
import gc
import importlib.util
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from app.environment import SET_LATE, replace_environment, set_environment, whole_environment
from app.errors import ConfigError
from app.launch.fork_client import ENDING, SOCKET_VARIABLE, run

MAX_BODY_BYTES = 2**20
NUM_STREAMS = 3
CLIENT = Path(__file__).with_name("fork_client.py")
SERVER_MODULE = "app.launch.forks"
MAX_WAITING = 64
ForkServerProcess = subprocess.Popen[bytes]
ENDS_WITHIN_S = 10.0  # the server gives its forks 2 s
# Modules that the agents, the controller, the proxies and the replicas import; their forks share
# the memory of modules imported before. Ray must not be among them: its library seeds its random
# numbers at import, so forks would draw equal task ids. Modules that are not installed (tqdm) are
# skipped.
MODULES = (
    *("aiohttp.web", "fastapi", "filelock", "grpc.aio", "grpc_reflection.v1alpha.reflection"),
    *("jsonschema", "msgpack", "numpy", "opencensus.stats.stats"),
    "opentelemetry.proto.collector.metrics.v1.metrics_service_pb2",
    *("opentelemetry.sdk.metrics", "opentelemetry.sdk.trace", "pandas", "pdb"),
    *("prometheus_client.parser", "psutil", "pydantic", "requests", "starlette.routing"),
    *("tarfile", "tqdm.auto", "uvicorn", "uvloop", "yaml"),
    *("models.openvino_network", "app.settings", "models.image_files"),
)
FORKS_END_WITHIN_S = 2.0  # Ray's agents outlive a raylet that was killed
REQUEST_WITHIN_S = 5.0  # for a client to say what it wants
FORKED = b"forked\n"
# No module imported here reads variables with these prefixes.
RAY_PREFIXES = ("RAY_", "SPT_NOENV")


@dataclass(frozen=True)
class ForkRequest:
    """A process that Ray wants started."""

    target: str | None  # the script; None for a worker
    arguments: list[str]
    environment: dict[str, str]
    folder: str
    leads_group: bool  # a process group, as Ray's workers do, so that Ray ends their children
    blocked: list[int]  # blocked signals
    ignored: list[int]  # ignored signals, among those that end a process: nohup ignores SIGHUP
    streams: list[int]  # file descriptors: standard input, output and error

    def close(self) -> None:
        for stream in self.streams:
            os.close(stream)


def received(client: socket.socket) -> ForkRequest:
    """Receive a request: a byte that brings the streams, then a line of JSON.

    Raises:
        OSError, ValueError: the message is incomplete, late or malformed.
    """
    _, streams, _, _ = socket.recv_fds(client, 1, NUM_STREAMS)
    try:
        with client.makefile("rb") as file:
            line = file.readline(MAX_BODY_BYTES)
        if not line.endswith(b"\n"):
            raise ValueError(f"a request without an end within {MAX_BODY_BYTES} bytes")
        if len(streams) != NUM_STREAMS:
            raise ValueError(f"{len(streams)} streams")
        try:
            return ForkRequest(**json.loads(line), streams=streams)
        except TypeError as error:  # other keys, or no mapping
            raise ValueError("not a request's keys") from error
    except BaseException:
        for stream in streams:
            os.close(stream)
        raise


def become(asked: ForkRequest) -> None:
    """Run the script in this process, as a new interpreter would; may not return."""
    for number, stream in enumerate(asked.streams):
        os.dup2(stream, number)
    asked.close()
    os.chdir(asked.folder)
    replace_environment(asked.environment)
    if asked.leads_group:
        os.setpgid(0, 0)
    for number in ENDING:
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in asked.ignored else default)
    signal.pthread_sigmask(signal.SIG_SETMASK, asked.blocked)
    run(asked.target, asked.arguments)


@contextlib.contextmanager
def fork_server(folder: Path) -> Iterator[ForkServerProcess]:
    """Start a fork server in the current environment, which Ray's processes get as well."""
    path = folder / "forks.sock"
    set_environment({SOCKET_VARIABLE: str(path)}, ours=(SOCKET_VARIABLE,))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(MAX_WAITING)  # clients wait until the server has imported everything
        number = listener.fileno()
        # With -P the working folder is not searched, where another program's "app" may be.
        command = [sys.executable, "-P", "-m", SERVER_MODULE, str(number), ",".join(MODULES)]
        try:  # in our session: the server blocks Ctrl-C, and must end its forks in order
            server = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # closed when this process ends in any way, then it ends
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[number],
                env=whole_environment(),  # libraries may change the C library's
            )
        except OSError as error:
            raise ConfigError(
                f"the fork server could not be started: {error}; is memory left?"
            ) from error
    try:
        yield server
    finally:
        end_server(server)  # within its time limit, even after an error


def ask_to_end(server: ForkServerProcess) -> None:
    """Close the fork server's input, on which it ends its forks and itself."""
    assert server.stdin is not None
    server.stdin.close()


def end_server(server: ForkServerProcess) -> None:
    """Ask the fork server to end, and kill it after :data:`ENDS_WITHIN_S`."""
    ask_to_end(server)
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(ENDS_WITHIN_S)
    server.kill()
    server.wait()


class ForkServer:
    """Answers one client at a time; in a fork, :meth:`serve` returns the process to become."""

    def __init__(self, listener: socket.socket) -> None:
        self._environment = whole_environment()
        self._listener = listener
        self._agents: dict[int, socket.socket] = {}  # by pid: the clients that wait for the end
        self._pids: set[int] = set()
        self._selector = selectors.DefaultSelector()
        self._wakes, self._woken = socket.socketpair()
        for end in (self._wakes, self._woken):
            end.setblocking(False)

    def serve(self) -> ForkRequest | None:
        """Fork for each client; return None once standard input has been closed."""
        signal.set_wakeup_fd(self._woken.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # so that the signal wakes the loop
        for file in (self._listener, self._wakes, sys.stdin):
            self._selector.register(file, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in self._selector.select()]
            if sys.stdin in ready:
                self._end_forks()
                return None
            if self._wakes in ready:
                self._wakes.recv(1024)
                self._reap()
            if self._listener in ready and (asked := self._accept()) is not None:
                return asked
            for pid in [pid for pid, client in self._agents.items() if client in ready]:
                self._forget(pid)
                os.kill(pid, signal.SIGTERM)  # Ray has ended the client, which stands for this fork

    def _accept(self) -> ForkRequest | None:
        client, _ = self._listener.accept()
        with contextlib.suppress(OSError, ValueError):  # the client then runs the script
            client.settimeout(REQUEST_WITHIN_S)
            asked = received(client)
            if not (others := self._others(asked.environment)):
                return self._fork(client, asked)
            asked.close()
            client.sendall(f"refused: other {', '.join(others)}\n".encode())
        client.close()
        return None

    def _others(self, environment: dict[str, str]) -> list[str]:
        """Return the variables that differ from those that the imported modules may have read."""
        changed = dict(environment.items() ^ self._environment.items()).keys() - {*SET_LATE}
        return sorted(name for name in changed if not name.startswith(RAY_PREFIXES))

    def _fork(self, client: socket.socket, asked: ForkRequest) -> ForkRequest | None:
        if (pid := os.fork()) == 0:
            self._leave(client)
            return asked
        asked.close()
        self._pids.add(pid)
        client.sendall(FORKED)
        if asked.target is None:
            client.close()
        else:
            self._agents[pid] = client
            self._selector.register(client, selectors.EVENT_READ)
        return None

    def _leave(self, client: socket.socket) -> None:
        """Close the server's sockets and pipes, in a fork."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        for opened in (self._listener, self._wakes, self._woken, client, *self._agents.values()):
            opened.close()

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):  # there are no children
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                self._pids.discard(pid)
                if pid in self._agents:
                    code = os.waitstatus_to_exitcode(status)
                    with contextlib.suppress(OSError):
                        self._agents[pid].sendall(b"%d\n" % (code if code >= 0 else 128 - code))
                    self._forget(pid)

    def _forget(self, pid: int) -> None:
        client = self._agents.pop(pid)
        self._selector.unregister(client)
        client.close()

    def _end_forks(self) -> None:
        ends = time.monotonic() + FORKS_END_WITHIN_S
        while self._pids and time.monotonic() < ends:
            self._reap()
            time.sleep(0.02)
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)  # not waited for yet, so the pid is still the child's


def import_all(modules: list[str]) -> None:
    """Import the installed ones of these modules, for this process and its forks.

    Stops early if standard input is closed, so that a command that fails at once need not wait.
    """
    for module in modules:
        if select.select([sys.stdin], [], [], 0)[0]:
            return
        if importlib.util.find_spec(module.partition(".")[0]) is not None:
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a garbage collection in a fork would write to every shared page


def main(listener: socket.socket, modules: list[str]) -> ForkRequest | None:
    """Import the modules, then answer clients."""
    # Ctrl-C in a terminal and systemd's SIGTERM are for the command, which ends this process after
    # Ray.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    server = ForkServer(listener)
    import_all(modules)
    return server.serve()


if __name__ == "__main__":
    _modules = sys.argv[2].split(",")
    if (_asked := main(socket.socket(fileno=int(sys.argv[1])), _modules)) is not None:
        become(_asked)
