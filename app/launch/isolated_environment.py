"""The environment and HAProxy files of one run, isolated from other services on the machine."""

import contextlib
import secrets
from collections.abc import Callable, Iterator
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
from app.launch.haproxy.command import SILENT_S, HaproxyCommand, max_connections
from app.launch.ports import free_port
from app.launch.ray_sources import check_variables
from app.launch.run_folder import run_folder

STARTER = Path(__file__).with_name("haproxy") / "start.sh"
TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"
HAPROXY_SCRIPT = "haproxy.sh"  # in the run's folder; STARTER looks for it there


@contextlib.contextmanager
def fast_serve(
    *,
    is_joining: bool = False,
    is_portable: bool = False,
    warn: Callable[[str], None] = lambda _: None,
) -> Iterator[HaproxyCommand]:
    """Set the environment that makes Serve fast, with a folder of its own for HAProxy's files.

    Must be entered before ray is imported: Serve reads its environment once, at import, and
    whatever Ray starts inherits it. Who ``is_joining`` a cluster is not on loopback alone. What
    ``is_portable`` has Serve's own proxy in front, which is everywhere.

    Raises:
        ConfigError: the installed Ray is too old, or does not read a variable that protects the
            service. Others that it does not read are a warning.

    """
    with run_folder() as run_dir:
        ports = (free_port(), free_port())
        # Where Serve's own proxy answers what HAProxy has no replica for. Two services would share
        # the usual port (SO_REUSEPORT) and answer each other's requests.
        fallback = {
            f"RAY_SERVE_FALLBACK_PROXY_{protocol}_PORT": str(free_port())
            for protocol in ("HTTP", "GRPC")
        }
        # The same holds for the replicas' own ports of gRPC, whatever Serve says of reuse: each run
        # has its own hundred.
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
        for warning in check_variables(values):
            warn(warning)
        if is_joining:
            del values[RAY_ON_ALL_INTERFACES]
        else:
            values |= _own_token(run_dir)
        # A shell may have a cluster's (tandem environment), or another program's: not with the
        # limits of this run.
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
    """Return where the secret of this run's Ray is; nothing if the user has one for Ray.

    Without it Ray makes one for all clusters of the user, in a home that there may not be.
    """
    if environment_value("RAY_AUTH_TOKEN", TOKEN_PATH):
        return {}
    file = run_dir / "token"
    file.touch(0o600)
    file.write_text(secrets.token_hex(32), "ascii")
    return {TOKEN_PATH: str(file)}
