"""The ``tandem`` command line: registers all commands, and turns errors into a line and a code."""

import io
import os
import sys
from importlib.metadata import entry_points, version
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperCommand, TyperOption

from app.cli.bench import bench
from app.cli.classify import classify
from app.cli.serve import environment, serve
from app.cli.traffic import traffic
from models.errors import TandemError
from models.machine import DISTRIBUTION

STREAMS = (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w"))


class Command(TyperCommand):
    """A command whose help names no variables, and whose first sentence is listed whole."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for parameter in self.params:
            if isinstance(parameter, TyperOption):
                parameter.show_envvar = False  # serve's text states the rule

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Parse; name the variable in the error of a value that no flag gave."""
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            name = (error.param and error.param.name) or ""
            source = ctx.get_parameter_source(name)
            if source is not None and source.name == "ENVIRONMENT":
                error.param_hint = f"{ctx.auto_envvar_prefix}_{name.upper()}"
            raise

    def get_short_help_str(self, limit: int = 1000) -> str:
        return super().get_short_help_str(max(limit, 1000))


# Help is plain text: Rich's tables cut the names of options in a terminal of 80 columns.
app = typer.Typer(
    help="An image-classification ensemble on CPUs: INT8 networks as a Ray Serve graph.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
models_app = typer.Typer(
    help="Model sets: list, verify, add, fetch, and their versions.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
# TANDEM_ is the settings' prefix.
app.command(cls=Command, context_settings={"auto_envvar_prefix": "TANDEM"})(serve)
for _command in (classify, bench, traffic, environment):
    app.command(cls=Command)(_command)
app.add_typer(models_app, name="models")
for _group, _typer in (("tandem.commands", app), ("tandem.models_commands", models_app)):
    for _entry in entry_points(group=_group):  # calibration adds its own: app never imports it
        _typer.command(_entry.name, cls=Command)(_entry.load())


@app.callback(invoke_without_command=True)
def _options(
    show_version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if show_version:
        typer.echo(f"tandem {version(DISTRIBUTION)}")
        raise typer.Exit


def main() -> None:
    """Run the command line; print a :class:`TandemError` as one line, with exit code 2.

    The error's notes, such as the place of logs, follow on lines of their own.
    """
    open_standard_streams()
    print_every_name()
    try:
        app()
    except TandemError as error:
        console = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False)
        console.print(f"[red]tandem:[/] {escape(error.message)}")
        for note in getattr(error, "__notes__", ()):
            console.print(escape(note))
        raise SystemExit(2) from None


def print_every_name() -> None:
    """Let stdout print what its encoding lacks, as stderr does: a file's name may be any bytes."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def open_standard_streams() -> None:
    """Open closed standard streams (``2>&-``) on /dev/null.

    Otherwise the next opened file or connection would get their number, and a child process would
    write its errors into it.
    """
    for name, number, mode in STREAMS:
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
