"""Starts the fork server of a Ray of our own, and ends it."""

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from app.compute.child_process import Child
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
    "uvicorn",
    "uvloop",
    "yaml",
    "models.runtime",
    "models.image_files",
)


@contextlib.contextmanager
def fork_server(folder: Path) -> Iterator[Child]:
    """Start one with the environment as it is now, which is that of Ray's processes from now on."""
    path = folder / "forks.sock"
    set_environment({SOCKET_VARIABLE: str(path)}, ours=(SOCKET_VARIABLE,))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(MAX_WAITING)  # whoever asks before it has imported everything waits
        number = listener.fileno()
        server = Child(
            "the fork server",
            # -P: not from the working folder, where another program's "app" may be.
            [sys.executable, "-P", "-m", SERVER_MODULE, str(number), ",".join(MODULES)],
            errors=subprocess.DEVNULL,
            descriptors=[number],
            environment=whole_environment(),  # a library may have changed the C library's
            patience_s=ENDS_WITHIN_S,
            has_session=False,  # it blocks Ctrl-C, and has forks to end in order
        )
    try:
        yield server
    finally:
        server.end()  # in its time, whatever was raised
