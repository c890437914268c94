"""Starts the fork server of a Ray of our own, and ends it."""

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from app.environment import set_environment, whole_environment
from app.launch.forks.client import PIPE_CHECK, SOCKET_VARIABLE

CLIENT = Path(__file__).with_name("client.py")
SERVER_MODULE = "app.launch.forks.server"
MAX_WAITING = 64
ENDS_WITHIN_S = 10.0  # it gives its forks five
# What Ray puts into the environment of its processes, some of which is read at import.
OF_ALL_PROCESSES = {"RAY_CLIENT_MODE": "0", "RAY_LD_PRELOAD_ON_WORKERS": "0", PIPE_CHECK: "1"}
# What the agents, the controller, the proxies and the replicas import.
MODULES = (
    "ray._private.workers.default_worker",
    "ray.dashboard.agent",
    "ray.serve._private.controller",
    "ray.serve._private.haproxy",
    "ray.serve._private.replica",
    "app.main",
    "app.deployments.grpc_server",
)


class RunningForkServer:
    """A fork server that was started: Ray starts ``client`` instead of its own scripts."""

    client = CLIENT

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process

    def ask_to_end(self) -> None:
        """Tell it that Ray has ended, and return at once."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    def end(self) -> None:
        """Tell it, and wait until it has ended."""
        self.ask_to_end()
        try:
            self._process.wait(ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def fork_server(folder: Path) -> Iterator[RunningForkServer]:
    """Start one with the environment as it is now, which is that of Ray's processes from now on."""
    path = folder / "forks.sock"
    set_environment({SOCKET_VARIABLE: str(path)}, ours=(SOCKET_VARIABLE,))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(MAX_WAITING)  # whoever asks before it has imported everything waits
        number = listener.fileno()
        process = subprocess.Popen(
            [sys.executable, "-m", SERVER_MODULE, str(number), *MODULES],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[number],
            env=whole_environment() | OF_ALL_PROCESSES,
        )
    running = RunningForkServer(process)
    try:
        yield running
    finally:
        running.end()
