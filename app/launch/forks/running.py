"""Starts and ends the fork server of a local Ray."""

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from app.environment import set_environment, whole_environment
from app.errors import ConfigError
from app.launch.forks.client import SOCKET_VARIABLE

CLIENT = Path(__file__).with_name("client.py")
SERVER_MODULE = "app.launch.forks.server"
MAX_WAITING = 64
ForkServer = subprocess.Popen[bytes]
ENDS_WITHIN_S = 10.0  # the server gives its forks 5 s
# Modules that the agents, the controller, the proxies and the replicas import; their forks share
# the memory of modules imported before. Ray must not be among them: its library seeds its random
# numbers at import, so forks would draw equal task ids. Modules that are not installed (tqdm) are
# skipped.
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
    "pandas",
    "pdb",
    "prometheus_client.parser",
    "psutil",
    "pydantic",
    "requests",
    "starlette.routing",
    "tarfile",
    "tqdm.auto",
    "uvicorn",
    "uvloop",
    "yaml",
    "models.runtime",
    "app.settings",
    "models.image_files",
)


@contextlib.contextmanager
def fork_server(folder: Path) -> Iterator[ForkServer]:
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


def ask_to_end(server: ForkServer) -> None:
    """Close the fork server's input, on which it ends its forks and itself."""
    assert server.stdin is not None
    server.stdin.close()


def end_server(server: ForkServer) -> None:
    """Ask the fork server to end, and kill it after :data:`ENDS_WITHIN_S`."""
    ask_to_end(server)
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(ENDS_WITHIN_S)
    server.kill()
    server.wait()
