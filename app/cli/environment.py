"""``tandem environment``: prints the variables that a cluster node needs before ``ray start``."""

import shlex
from pathlib import Path
from typing import Annotated

import typer
from platformdirs import user_data_path

from app.calls.ray_compatibility import check_ray_version
from app.environment import HAPROXY_COMMAND, PROJECT, node_environment
from app.errors import ConfigError
from app.launch.haproxy import HaproxyCommand, max_connections
from app.launch.haproxy_rules import APPLICATION, RuleOptions
from app.launch.ray_sources import check_protecting
from app.setting_values import check_origins
from models.user_folders import needed_folder

IS_INSTALLED = (PROJECT / "__init__.py").exists()  # from a wheel; a checkout is not a package


def environment(
    folder: Annotated[
        Path | None, typer.Option(help="folder for the command that starts HAProxy")
    ] = None,
    application: Annotated[
        str, typer.Option(help="name in serve_config.yaml; HAProxy's limits apply to it alone")
    ] = APPLICATION,
    allowed_origin: Annotated[
        list[str] | None,
        typer.Option(help="an origin of allowed_origins, for HAProxy's own answers; repeatable"),
    ] = None,
    where: Annotated[
        bool, typer.Option("--where", help="print only the folder of serve_config.yaml and configs")
    ] = False,
) -> None:
    """Print the variables that make Ray Serve fast and safe: eval "$(tandem environment)".

    Ray Serve reads them when it starts. So every node of a cluster needs them before ray start, and
    a shell before serve run "$(tandem environment --where)/serve_config.yaml".
    """
    if where:
        typer.echo(PROJECT)
        return
    try:
        origins = check_origins(tuple(allowed_origin or ()))
    except ValueError as error:
        raise ConfigError(f"--allowed-origin: {error}") from error
    place = (folder or needed_folder(user_data_path)).absolute()
    most = {"RAY_SERVE_HAPROXY_MAXCONN": str(max_connections())}
    values = node_environment(place / HAPROXY_COMMAND) | most
    check_protecting(values)
    if (untested := check_ray_version()) is not None:
        typer.echo(untested, err=True)
    try:
        place.mkdir(parents=True, exist_ok=True)
        options = RuleOptions(application=application, origins=origins)
        HaproxyCommand(place / HAPROXY_COMMAND, ports=None).write(options)
    except OSError as error:
        raise ConfigError(
            f"cannot write {place}: {error.strerror}; give --folder a folder that can be written"
        ) from error
    for name, value in values.items():
        typer.echo(f"export {name}={shlex.quote(value)}")
    if IS_INSTALLED:  # so that "import_path: app.main:build" is importable, as in a checkout
        folder_first = f"{shlex.quote(str(PROJECT))}${{PYTHONPATH:+:$PYTHONPATH}}"
        typer.echo(f"export PYTHONPATH={folder_first}")
