"""The ``tandem`` command line: every command, and how errors become one line and an exit code."""

from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from app.cli.bench import bench
from app.cli.classify import classify
from app.cli.environment import environment
from app.cli.models import models_app
from app.cli.plan import plan
from app.cli.trace import trace
from app.cli.tune import tune
from models.errors import TandemError

app = typer.Typer(
    help="An image-classification ensemble on CPUs: INT8 networks as a Ray Serve graph.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.command()(classify)
app.command()(bench)
app.command()(tune)
app.command()(plan)
app.command()(trace)
app.command()(environment)
app.add_typer(models_app, name="models")
for _group, _typer in (("tandem.commands", app), ("tandem.models_commands", models_app)):
    for _entry in entry_points(group=_group):  # calibration adds its own: app never imports it
        _typer.command(_entry.name)(_entry.load())


@app.callback(invoke_without_command=True)
def _options(
    show_version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if show_version:
        typer.echo(f"tandem {version('tandem')}")
        raise typer.Exit


@app.command()
def serve(
    model_set: Annotated[str | None, typer.Option(help="name of a set, or its folder")] = None,
    config: Annotated[
        Path | None, typer.Option(help="Ray Serve configuration  (default: serve_config.yaml)")
    ] = None,
    host: Annotated[str | None, typer.Option(help="0.0.0.0 serves other machines")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535)] = None,
    address: Annotated[
        str | None, typer.Option(help="a running Ray cluster to join: auto, or HOST:PORT")
    ] = None,
    allow_unverified: Annotated[
        bool, typer.Option(help="serve a set even if INT8 lost more than its max_drop")
    ] = False,
    metrics_port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="for Prometheus  (default: 9464, or else a free one)"),
    ] = None,
    api_keys_file: Annotated[
        Path | None, typer.Option(help="let in only callers with a key of this file, one a line")
    ] = None,
    grpc_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="serve gRPC too, there  (default: not)")
    ] = None,
) -> None:
    """Serve the ensemble over HTTP until Ctrl-C; Ray is started for it and stopped with it.

    With --address the graph is put on a running cluster instead, and taken off it at the end. The
    cluster's nodes need the environment of configs/README.md to be fast.
    """
    from app.launch.serve import ServeOptions, run_service

    run_service(
        ServeOptions(
            model_set,
            config,
            host,
            port,
            address,
            allow_unverified,
            metrics_port,
            api_keys_file,
            grpc_port,
        )
    )


def main() -> None:
    """Run the command line; a :class:`TandemError` becomes one line and exit code 2."""
    try:
        app()
    except TandemError as error:
        Console(stderr=True, soft_wrap=True).print(
            f"[red]tandem:[/] {escape(error.message)}", highlight=False
        )
        raise SystemExit(2) from None
