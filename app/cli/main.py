"""The ``tandem`` command line: its commands by name, and errors as a line and a code.

A command's module is imported when the command is called: ``tandem --version`` waits for none.
Options that more than one command takes are here, with their checks, and options as a dataclass.
"""

import ast
import inspect
import io
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points, version
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption
from typer.main import get_command

from app.errors import ConfigError
from models.errors import TandemError
from models.files import check_can_write
from models.machine import DISTRIBUTION, needs_extra

if TYPE_CHECKING:
    from app.access import ClientTls

STREAMS = (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w"))
# By group; "" is tandem itself.
OWN_COMMANDS = {
    "": {
        "serve": "app.cli.serve:serve",
        "classify": "app.cli.classify:classify",
        "classify-offline": "app.cli.classify:classify_offline",
        "bench": "app.cli.bench:bench",
        "keys": "app.cli.traffic:keys",
        "environment": "app.cli.serve:environment",
        "doctor": "app.cli.serve:doctor",
    },
    "traffic": {
        "show": "app.cli.traffic:show",
        "set": "app.cli.traffic:set_shares",
        "promote": "app.cli.traffic:promote",
        "rollback": "app.cli.traffic:rollback",
    },
}
# Calibration adds commands by entry points, since app never imports it.
ENTRY_POINTS = {"": "tandem.commands", "models": "tandem.models_commands"}
DEFAULTS = {"traffic": "show"}  # by group: the command that runs if none is named
SERVICE, OFFLINE = "classify", "classify-offline"  # the first with --offline is the second
# How the help lists the commands. Those that no section names come last, without an example.
SECTIONS = {
    "Serve": (
        "tandem serve --plan fast",
        ("serve", "classify", "classify-offline", "bench", "doctor"),
    ),
    "Models": (
        "tandem models add mine resnet.onnx densenet.onnx --labels labels.txt",
        ("learn", "models", "quantize", "evaluate", "ladder"),
    ),
    "Operate": (
        "tandem traffic set imagenet@1083e06ff666=95 imagenet@5b1de7a0f9c2=5",
        ("traffic", "keys", "drift", "environment"),
    ),
    "Size": ("tandem plan --rate 400", ("plan",)),
}
# Help is plain text: Rich's tables cut the names of options in a terminal of 80 columns.
PLAIN: dict[str, Any] = {"rich_markup_mode": None, "pretty_exceptions_enable": False}
PLOTS = (".png", ".svg")

PhotoFolder = Annotated[
    Path | None, typer.Option(help="folder of photos like yours  (default: generated ones)")
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="print JSON, or write it to this file")
]
Plot = Annotated[Path | None, typer.Option(help="file for a plot, .png or .svg")]


class Command(TyperCommand):
    """A command whose help names no variables."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for parameter in self.params:
            if isinstance(parameter, TyperOption):
                parameter.show_envvar = False  # serve's text states the rule

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Parse; name the variable in the error of a value that no flag gave.

        ``--json`` without a file is ``--json -`` where a command can write it to one.
        """
        to_file = any("--json" in of.opts and not getattr(of, "is_flag", 0) for of in self.params)
        for place in reversed([at for at, word in enumerate(args) if word == "--json" and to_file]):
            if not args[place + 1 :] or args[place + 1].startswith("--"):
                args = [*args[: place + 1], "-", *args[place + 1 :]]
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            name = (error.param and error.param.name) or ""
            source = ctx.get_parameter_source(name)
            if source is not None and source.name == "ENVIRONMENT":
                error.param_hint = f"{ctx.auto_envvar_prefix}_{name.upper()}"
            raise


class ListedCommand(TyperCommand):
    """A command as its group lists it; its module is imported when it is called."""

    def __init__(self, entry: EntryPoint) -> None:
        super().__init__(entry.name)
        self._entry = entry

    @cached_property
    def loaded(self) -> Command:
        """The command itself, with its parameters and whole help."""
        alone = typer.Typer(add_completion=False, **PLAIN)
        # TANDEM_ is the settings' prefix, and these read settings from variables.
        variables = {"auto_envvar_prefix": "TANDEM"} if self.name in ("serve", "doctor") else {}
        function = one_parameter_a_field(self._entry.load())
        alone.command(self.name, cls=Command, context_settings=variables)(function)
        command = get_command(alone)
        assert isinstance(command, Command)
        return command

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Parse the arguments with the command itself, which the context then runs."""
        return self.loaded.make_context(*args, **kwargs)

    def get_short_help_str(self, limit: int = 45) -> str:
        """Return the whole first sentence of the docstring, read from the source."""
        self.help = docstring(self._entry)
        return super().get_short_help_str(max(limit, 1000))


def docstring(entry: EntryPoint) -> str:
    """Return the docstring of an entry point's function without importing its module."""
    spec = find_spec(entry.module)
    assert spec is not None
    assert spec.origin is not None
    for node in ast.parse(Path(spec.origin).read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == entry.attr:
            return ast.get_docstring(node) or ""
    raise LookupError(f"{entry.module} defines no function {entry.attr}")


class CommandGroup(TyperGroup):
    """A group of commands, each imported when it is called."""

    def __init__(self, *, name: str, commands: dict[str, Any], **attributes: Any) -> None:
        own = OWN_COMMANDS.get(name, {})
        entries = [EntryPoint(command, path, "") for command, path in own.items()]
        if name in ENTRY_POINTS:
            entries += entry_points(group=ENTRY_POINTS[name])
        listed = {entry.name: ListedCommand(entry) for entry in entries}
        super().__init__(name=name, commands=listed | commands, **attributes)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse; without a command's name the group's default command gets the options."""
        default = DEFAULTS.get(self.name or "")
        if default and (not args or (args[0].startswith("-") and args[0] != "--help")):
            args = [default, *args]
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command; a name that another group has is answered with that command."""
        if args[0] in (SERVICE, OFFLINE) and not self.name:
            args = self._service_or_offline(ctx, args)
        if self.get_command(ctx, args[0]) is None:
            for name, group in self.commands.items():
                if isinstance(group, CommandGroup) and args[0] in group.commands:
                    ctx.fail(f"No such command '{args[0]}'. Did you mean tandem {name} {args[0]}?")
        return super().resolve_command(ctx, args)

    def _service_or_offline(self, ctx: Any, args: list[str]) -> list[str]:
        """Make ``classify --offline`` the other command; refuse an option of the other alone."""
        words = list(takewhile(lambda word: word != "--", args))
        if "--offline" in words:
            words.remove("--offline")
            args = [OFFLINE, *words[1:], *args[len(words) + 1 :]]
        other = OFFLINE if args[0] == SERVICE else SERVICE
        listed: Any = self.commands
        own, others = (
            {option for parameter in listed[name].loaded.params for option in parameter.opts}
            for name in (args[0], other)
        )
        for option in (word.partition("=")[0] for word in words):
            if option in others - own and option.startswith("--"):
                ctx.fail(f"{option} is an option of tandem {other}, not of tandem {args[0]}")
        return args

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands in their sections, each with an example; a group's in one list."""
        if self.name:
            super().format_commands(ctx, formatter)
            return
        rows = {name: command.get_short_help_str(1000) for name, command in self.commands.items()}
        width = max(map(len, rows))
        rest = set(rows).difference(*(names for _, names in SECTIONS.values()))
        for title, (example, names) in (*SECTIONS.items(), ("More", ("", tuple(sorted(rest))))):
            if present := [name for name in names if name in rows]:
                with formatter.section(title):
                    formatter.write_dl([(name.ljust(width), rows[name]) for name in present])
                    if example:
                        formatter.write_text(f"$ {example}")


app = typer.Typer(
    cls=CommandGroup,
    help="An image-classification ensemble on CPUs: INT8 networks as a Ray Serve graph.",
    no_args_is_help=True,
    **PLAIN,
)
GROUPS = {
    "models": "Model sets: list, verify, add, fetch, and their versions.",
    "traffic": "Show or change how requests are split between versions of a set.",
}
for group, purpose in GROUPS.items():
    alone = group not in DEFAULTS
    listed = typer.Typer(
        cls=CommandGroup, help=purpose, no_args_is_help=alone, rich_markup_mode=None
    )
    app.add_typer(listed, name=group)


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
        from rich.console import Console
        from rich.markup import escape

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


@dataclass(frozen=True)
class Caller:
    """The key and the certificates with which a command calls a service."""

    key_file: Annotated[
        Path | None, typer.Option(help="file with the service's API key  (default: TANDEM_API_KEY)")
    ] = None
    ca: Annotated[
        Path | None,
        typer.Option(
            help="root certificates for https://  (default: SSL_CERT_FILE, or the system's)"
        ),
    ] = None
    client_cert: Annotated[
        Path | None, typer.Option(help="client certificate in PEM, for a service that requires one")
    ] = None
    client_key: Annotated[
        Path | None, typer.Option(help="private key of --client-cert  (default: in the same file)")
    ] = None

    @property
    def tls(self) -> "ClientTls":
        """The files of TLS."""
        from app.access import ClientTls

        return ClientTls(self.ca, self.client_cert, self.client_key)


def service_url(text: str) -> str:
    """Return the address of a service without a slash at its end.

    Raises :class:`ConfigError` if it is not an ``http://`` or ``https://`` URL.
    """
    from tandem_client.exchange import checked_url

    try:
        return checked_url(text)
    except ValueError as error:
        raise ConfigError(f"--url: {error}") from error


def check_can_plot(path: Path | None, command: str) -> None:
    """Check that ``command --plot`` can draw into ``path``, before minutes of measuring.

    Raises:
        ResultFileError: the file cannot be written.
        ConfigError: it has another suffix than ``PLOTS``.
        MissingExtraError: matplotlib is not installed.
    """
    check_can_write(path)
    if path is None:
        return
    if path.suffix.lower() not in PLOTS:
        raise ConfigError(f"--plot {path}: a name that ends with {' or '.join(PLOTS)}")
    with needs_extra("calibrate", f"{command} --plot"):
        import matplotlib  # noqa: F401


def one_parameter_a_field(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command as Typer reads it: each dataclass that it takes becomes its fields.

    So an option is written once: as a field with its type, its ``typer.Option`` and its default.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters = dict[str, inspect.Parameter]()
    fields = dict[str, dict[str, inspect.Parameter]]()
    for name, parameter in inspect.signature(command).parameters.items():
        if is_dataclass(hints[name]):
            fields[name] = dict(inspect.signature(hints[name]).parameters)
            parameters |= fields[name]
        else:
            parameters[name] = parameter

    def typed(**values: Any) -> None:
        for name, own in fields.items():
            values[name] = hints[name](**{field: values.pop(field) for field in own})
        command(**values)

    by_name = [each.replace(kind=each.KEYWORD_ONLY) for each in parameters.values()]
    typed.__signature__ = inspect.Signature(by_name)  # type: ignore[attr-defined]
    typed.__annotations__ = {each.name: each.annotation for each in by_name}
    typed.__doc__ = command.__doc__
    return typed
