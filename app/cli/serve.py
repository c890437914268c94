"""``tandem serve`` and ``tandem environment``: serve here or on a cluster, and prepare a node.

``tandem environment`` prints the variables that a cluster node needs before ``ray start``.
"""

import json
import shlex
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer
from platformdirs import user_data_path

from app.environment import HAPROXY_COMMAND, PROJECT, node_environment
from app.errors import ConfigError
from app.launch.haproxy import HaproxyCommand, max_connections
from app.launch.haproxy_rules import APPLICATION, RuleOptions
from app.launch.ray_features import check_protecting
from app.launch.serve_options import ServeOptions, resolved, unknown_variables
from app.serve.ray_compatibility import check_ray_version
from app.setting_values import check_origins
from models.files import make_folder, needed_folder


def serve(
    context: typer.Context,
    options: ServeOptions,
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FILES",
            help="networks to serve as they are, in place of a set: ONNX, TFLite, OpenVINO IR",
        ),
    ] = None,
    labels: Annotated[
        Path | None,
        typer.Option(allow_from_autoenv=False, help="with files: their classes, one a line"),
    ] = None,
    print_config: Annotated[
        bool,
        typer.Option(
            "--print-config",
            allow_from_autoenv=False,
            help="print every setting and its source, and end",
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", allow_from_autoenv=False, help="with --print-config: as JSON")
    ] = False,
) -> None:
    """Serve the ensemble over HTTP until Ctrl-C; starts Ray, and stops it at the end.

    With --address it is deployed to a running cluster instead, and removed at the end. The
    cluster's nodes need the environment of docs/how-to/cluster.md to be fast. Every setting may
    also be a variable, TANDEM_<SETTING>. A flag precedes a variable, and a variable the file. Exit
    code 1: the service could not go on (docs/faults.md).
    """
    sources = {name: context.get_parameter_source(name) for name in context.params}
    flags = {name for name, source in sources.items() if source and source.name == "COMMANDLINE"}
    if files or labels:
        options, flags = _of_files(options, files or [], labels), flags | {"model_set", "precision"}
    if print_config:
        _print_config(options, flags, as_json=as_json)
        return
    if as_json:
        raise typer.BadParameter("--json goes with --print-config")
    from app.launch.serve import run_service

    run_service(options, flags)


def _of_files(options: ServeOptions, files: list[Path], labels: Path | None) -> ServeOptions:
    """Return the options with a set made of the files, which calibration makes."""
    if not files or labels is None:
        raise typer.BadParameter(
            "networks and --labels go together: tandem serve a.onnx --labels F"
        )
    if options.model_set is not None:
        raise typer.BadParameter(f"files, or the set {options.model_set!r}, not both")
    (entry,) = entry_points(group="tandem.offline", name="files")  # app never imports calibration
    folder, precision = entry.load()(files, labels)
    return replace(options, model_set=str(folder), precision=options.precision or precision)


def _print_config(options: ServeOptions, flags: set[str], *, as_json: bool) -> None:
    for line in unknown_variables():
        typer.echo(line, err=True)
    rows = resolved(options, flags)
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    lines = {f"{name}: {json.dumps(row['value'])}": row["source"] for name, row in rows.items()}
    width = min(max(map(len, lines)), 48)
    for line, source in lines.items():
        typer.echo(f"{line:{width}}  # {source}")


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
        make_folder(place)
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
