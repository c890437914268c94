"""``tandem serve``, ``tandem doctor`` and ``tandem environment``: serve here or on a cluster.

``tandem doctor`` shows what a start finds on this machine, and what to mend before it. ``tandem
environment`` prints the variables that a cluster node needs before ``ray start``.
"""

import json
import logging
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import entry_points, version
from pathlib import Path
from platform import python_version
from typing import Annotated, Literal

import psutil
import typer
from platformdirs import user_data_path
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from app.environment import HAPROXY_COMMAND, PROJECT, node_environment
from app.errors import ConfigError
from app.launch.config import ServeConfig
from app.launch.haproxy import HaproxyCommand, max_connections
from app.launch.haproxy_rules import APPLICATION, RuleOptions
from app.launch.log_and_metrics import logger
from app.launch.ray_features import check_protecting
from app.launch.serve_options import ServeOptions, resolved, unknown_variables
from app.serve.ray_compatibility import check_ray_version
from app.setting_values import check_origins
from models.errors import TandemError
from models.files import make_folder, needed_folder
from models.machine import DISTRIBUTION, available_cpus, cpu_model, instructions_of, usable_cpus


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
        bool,
        typer.Option("--json", allow_from_autoenv=False, help="print JSON, with --print-config"),
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


State = Literal["good", "warning", "error"]
STYLES = {"good": "green", "warning": "yellow", "error": "red"}
SERVED = ("ray", "openvino", "numpy")
# CPU-ms of the bundled set's networks for a photo: docs/performance.md.
NO_INT8 = (
    "INT8 has no instructions of its own here, and a photo costs about three times as much as with "
    "avx512_vnni, avx_vnni or amx_int8; plan: fast asks fewer networks"
)


@dataclass(frozen=True)
class Finding:
    """A subject, its state here, and what to do unless it is good."""

    about: str
    text: str
    state: State = "good"


def doctor(
    context: typer.Context,
    options: ServeOptions,
    as_json: Annotated[
        bool, typer.Option("--json", allow_from_autoenv=False, help="print JSON")
    ] = False,
) -> None:
    """Show what serve finds on this machine, and what to mend; exit code 1 if it would fail.

    It takes the options and variables of tandem serve, and makes the checks of its start:
    configuration, ports, memory, sets and their files. Nothing is started.
    """
    names = context.params.items()
    flags = {n for n, _ in names if (s := context.get_parameter_source(n)) and s.name != "DEFAULT"}
    findings = [*_of_machine(), *_of_start(options, flags)]
    has_error = any(finding.state == "error" for finding in findings)
    if as_json:
        rows = [asdict(finding) for finding in findings]
        typer.echo(json.dumps({"would_start": not has_error, "findings": rows}, indent=2))
    else:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for finding in findings:
            style = STYLES[finding.state]
            table.add_row(finding.about, f"[{style}]{finding.state}[/]", escape(finding.text))
        table.columns[2].overflow = "fold"
        console = Console(highlight=False, emoji=False)
        console.print(table)
        console.print("tandem serve would not start" if has_error else "tandem serve would start")
    if has_error:
        raise typer.Exit(1)


def _of_machine() -> Iterator[Finding]:
    cpu = cpu_model()
    has_int8 = {"avx512_vnni", "avx_vnni", "amx_int8"} & set(instructions_of(cpu).split())
    if has_int8:
        yield Finding("CPU", f"{cpu}; INT8 has instructions of its own")
    else:
        yield Finding("CPU", f"{cpu}; {NO_INT8}", "warning")
    used, there = available_cpus(), len(usable_cpus())
    quota = f" of {there}, by the group's quota" if used < there else ""
    yield Finding("cores", f"{used}{quota}")
    from app.stages.threads import memory_left

    total, left = psutil.virtual_memory(), memory_left(at_most=True)
    group = f"; the group leaves {left / 1e6:.0f} MB" if left < total.available else ""
    text = f"{total.available / 1e6:.0f} MB free of {total.total / 1e6:.0f} MB{group}"
    yield Finding("memory", text)
    versions = ", ".join(f"{name} {version(name)}" for name in (DISTRIBUTION, *SERVED))
    yield Finding("software", f"Python {python_version()}, {versions}")


def _of_start(options: ServeOptions, flags: set[str]) -> Iterator[Finding]:
    """Make the checks of a start; each of its warnings is a finding, and so is its error."""
    from app.launch.serve import checked_start

    with _said() as lines:
        try:
            with checked_start(options, flags) as config:
                yield from _of_config(config)
        except TandemError as error:
            yield Finding("start", error.message, "error")
    for line in lines:
        yield Finding("start", line, "warning")


def _of_config(config: ServeConfig) -> Iterator[Finding]:
    from app.traffic.control import loaded_sets
    from models.ledger import judge

    settings = config.settings
    ports = {"HTTP": config.http.port, "gRPC": config.grpc_port}
    free = ", ".join(f"{name} {port}" for name, port in ports.items() if port is not None)
    yield Finding("ports", f"{config.http.host}: {free}")
    for model_set in loaded_sets(settings):
        served = settings.served_precision
        members = ", ".join(member.name for member in model_set.manifest.members)
        verdict = judge(model_set.manifest, served, model_set.argument)
        # Another verdict is a warning of the start, which is a finding of its own.
        record = verdict.message if verdict.status == "verified" else model_set.name
        yield Finding("set", f"{record}; {served} of {members}")


@contextmanager
def _said() -> Iterator[list[str]]:
    """Collect the warnings that a start logs."""
    lines: list[str] = []

    class Collecting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                lines.append(record.getMessage())

    handler, propagate = Collecting(), logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
