"""Starts the fork server of a Ray of our own, and ends it."""

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from app.environment import set_environment, whole_environment
from app.launch.forks.client import SOCKET_VARIABLE

CLIENT = Path(__file__).with_name("client.py")
SERVER_MODULE = "app.launch.forks.server"
MAX_WAITING = 64
ENDS_WITHIN_S = 10.0  # it gives its forks five
# What the agents, the controller, the proxies and the replicas import: what is imported before the
# fork they share. Never Ray: its library seeds its random numbers when it is loaded, and forks of
# it would draw the same identities of tasks. One that is not installed (tqdm) is left out.
MODULES = (
    "aiohttp.web",
    "fastapi",
    "filelock",
    "grpc.aio",
    "grpc_reflection.v1alpha.reflection",
    "jsonschema",
    "msgpack",
    "numpy",
    "opencensus.stats.stats",
    "opentelemetry.proto.collector.metrics.v1.metrics_service_pb2",
    "opentelemetry.sdk.metrics",
    "opentelemetry.sdk.trace",
    "pdb",
    "prometheus_client.parser",
    "psutil",
    "pydantic",
    "requests",
    "starlette.routing",
    "tarfile",
    "tqdm.auto",
    "unittest",
    "uvicorn",
    "uvloop",
    "yaml",
    "models.runtime",
    "models.image_files",
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
            # -P: not from the working folder, where another program's "app" may be.
            [sys.executable, "-P", "-m", SERVER_MODULE, str(number), ",".join(MODULES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[number],
            env=whole_environment(),  # as Ray does; a library may have changed the C library's
        )
    running = RunningForkServer(process)
    try:
        yield running
    finally:
        running.end()
