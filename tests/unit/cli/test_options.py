"""A dataclass of options as Typer reads it."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from app.cli.options import one_parameter_a_field
from tests.support.command_line import all_commands


@dataclass(frozen=True)
class Wanted:
    """Options of a command."""

    images: Annotated[Path, typer.Option(help="a folder")]
    sizes: Annotated[list[int] | None, typer.Option("--size", min=1)] = None
    has_page: Annotated[bool, typer.Option("--page")] = False


@dataclass(frozen=True)
class Key:
    """Options that several commands share."""

    key_file: Path | None = None


def run(*arguments: str) -> tuple[int, str, list[object]]:
    """Run a command; return its exit code and output, and the arguments that it got."""
    got: list[object] = []

    def draw(wanted: Wanted, seed: int = 20, *, key: Key) -> None:
        """Draw pictures."""
        got.extend((wanted, seed, key))

    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(one_parameter_a_field(draw))
    done = CliRunner().invoke(app, arguments)
    return done.exit_code, done.output, got


def test_the_function_gets_its_dataclasses_checked():
    assert run("--images", "a") == (0, "", [Wanted(Path("a")), 20, Key()])
    _, _, got = run("--images=a", "--size=1", "--size=2", "--page", "--seed=3", "--key-file=k")
    assert got == [Wanted(Path("a"), [1, 2], has_page=True), 3, Key(Path("k"))]
    for arguments, says in (((), "--images"), (("--images=a", "--size=0"), "--size")):
        code, text, got = run(*arguments)
        assert (code, says in text, got) == (2, True, [])


def test_options_are_listed_in_the_order_of_fields_and_parameters() -> None:
    code, text, _ = run("--help")
    assert (code, "Draw pictures." in text) == (0, True)
    assert re.findall(r"^ +(--[a-z-]+)", text, re.M) == [
        *("--images", "--size", "--page", "--seed", "--key-file", "--help")
    ]


WITH_JSON = {
    " ".join(path): (command, option)
    for path, command in all_commands()
    for option in command.params
    if "--json" in option.opts
}


def test_commands_print_json():
    assert len(WITH_JSON) >= 20


@pytest.mark.parametrize("name", WITH_JSON)
def test_json_alone_prints_json_whatever_the_command(name):
    command, option = WITH_JSON[name]
    assert option.help.startswith("print JSON")

    def value(*words: str) -> object:
        context = command.make_context(name, [*words], resilient_parsing=True)
        return context.params[option.name]

    if option.is_flag:
        assert value("--json") is True
        return
    assert value("--json") == value("--json", "-") == Path("-")
    assert value("--json", "--help") == Path("-")
    assert value("--json", "file.json") == Path("file.json")
    assert value() is None
