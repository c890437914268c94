"""``tandem environment``: prints the variables that a cluster node needs before ``ray start``."""

import shlex
from pathlib import Path
from typing import Annotated

import typer
from platformdirs import user_data_path

from app.environment import HAPROXY_COMMAND, node_environment
from app.launch.haproxy.command import HaproxyCommand, max_connections
from app.launch.ray_internals import check_variables


def environment(
    folder: Annotated[
        Path | None, typer.Option(help="where the command that starts HAProxy is written")
    ] = None,
) -> None:
    """Print what makes Ray Serve fast and safe, for a shell: eval "$(tandem environment)".

    Ray Serve reads it when it starts: every node of a cluster needs it before ray start.
    """
    place = (folder or user_data_path("tandem")).absolute()
    most = {"RAY_SERVE_HAPROXY_MAXCONN": str(max_connections())}
    values = node_environment(place / HAPROXY_COMMAND) | most
    check_variables(values)
    place.mkdir(parents=True, exist_ok=True)
    HaproxyCommand(place / HAPROXY_COMMAND, ports=None).write()
    for name, value in values.items():
        typer.echo(f"export {name}={shlex.quote(value)}")
