"""The environment and HAProxy files of one run, isolated from other services on the machine."""

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path

from app.environment import (
    HA_PROXY,
    HAPROXY_COMMAND,
    HAPROXY_PATH,
    PROJECT,
    RAY_ON_ALL_INTERFACES,
    add_import_path,
    environment_value,
    has_haproxy,
    serve_environment,
    set_environment,
)
from app.launch.haproxy import SILENT_S, STARTER, HaproxyCommand, max_connections
from app.launch.ports import free_port
from app.launch.ray_sources import check_protecting
from app.launch.run_folder import run_folder

TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"
HAPROXY_SCRIPT = "haproxy.sh"  # its name in the run's folder, also in STARTER


@contextlib.contextmanager
def fast_serve(*, is_joining: bool = False, is_portable: bool = False) -> Iterator[HaproxyCommand]:
    """Set the environment that makes Serve fast, with an own folder for HAProxy's files.

    Enter this before ray is imported: Serve reads its environment once, at import, and the
    processes that Ray starts inherit it.

    Args:
        is_joining: whether a running cluster is joined, which is not on loopback only.
        is_portable: whether Serve's own proxy is used, which runs on every platform.

    Raises:
        ConfigError: the installed Ray is too old, or does not read a variable that protects the
            service.

    """
    with run_folder() as run_dir:
        ports = (free_port(), free_port())
        # Serve's own proxy listens on this port and answers requests while HAProxy has no replica.
        # Two services would share the usual port (SO_REUSEPORT) and answer each other's requests.
        fallback = {
            f"RAY_SERVE_FALLBACK_PROXY_{protocol}_PORT": str(free_port())
            for protocol in ("HTTP", "GRPC")
        }
        # The same holds for the replicas' gRPC ports, whatever Serve says of reuse. So each run has
        # its own hundred ports.
        first = min(free_port(), 65_400)
        fallback |= {
            "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT": str(first),
            "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT": str(first + 100),
        }
        limits = {
            "RAY_SERVE_HAPROXY_MAXCONN": str(max_connections()),
            "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": str(SILENT_S),
        }
        values = serve_environment(run_dir, ports) | fallback | limits
        check_protecting(values)
        if is_joining:
            del values[RAY_ON_ALL_INTERFACES]
        else:
            values |= _own_token(run_dir)
        # The shell may have a HAPROXY_PATH of a cluster (tandem environment) or of another program,
        # without this run's limits. So it is replaced.
        portable = {HA_PROXY: "0"} if is_portable else {}
        set_environment(values | portable, ours=(HAPROXY_PATH, *portable))
        add_import_path(PROJECT)
        (run_dir / HAPROXY_COMMAND).symlink_to(STARTER)
        command = HaproxyCommand(run_dir / HAPROXY_SCRIPT, ports)
        if has_haproxy():
            command.write()
        try:
            yield command
        finally:
            command.end_left_over()


def _own_token(run_dir: Path) -> dict[str, str]:
    """Return the variable for the secret of this run's Ray; {} if the user has set one for Ray.

    Without it Ray stores one secret for all clusters of the user in the home folder, which may not
    be writable.
    """
    if environment_value("RAY_AUTH_TOKEN", TOKEN_PATH):
        return {}
    file = run_dir / "token"
    file.touch(0o600)
    file.write_text(secrets.token_hex(32), "ascii")
    return {TOKEN_PATH: str(file)}
