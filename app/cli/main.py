"""The ``tandem`` command line: every command, and how errors become one line and an exit code."""

from importlib.metadata import entry_points, version
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from app.cli.bench import bench
from app.cli.classify import classify
from app.cli.environment import environment
from app.cli.ladder import ladder
from app.cli.models import models_app
from app.cli.plan import plan
from app.cli.serve import serve
from app.cli.standard_streams import open_standard_streams
from app.cli.trace import trace
from app.cli.tune import tune
from models.errors import TandemError

app = typer.Typer(
    help="An image-classification ensemble on CPUs: INT8 networks as a Ray Serve graph.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.command()(serve)
app.command()(classify)
app.command()(bench)
app.command()(tune)
app.command()(ladder)
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


def main() -> None:
    """Run the command line; a :class:`TandemError` becomes one line and exit code 2.

    Its notes, as where logs are, are lines of their own.
    """
    open_standard_streams()
    try:
        app()
    except TandemError as error:
        console = Console(stderr=True, soft_wrap=True, highlight=False)
        console.print(f"[red]tandem:[/] {escape(error.message)}")
        for note in getattr(error, "__notes__", ()):
            console.print(escape(note))
        raise SystemExit(2) from None
