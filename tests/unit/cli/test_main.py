"""The command line itself: help, version, imports, options, errors as one line, streams."""

import io
import itertools
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint, version
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from app.cli import main as cli
from app.cli.main import one_parameter_a_field
from tests.support.cases import cases
from tests.support.command_line import all_commands, tandem

ROOT = Path(__file__).parents[3]
ANSI = re.compile(r"\x1b\[[0-9;]*m")


COMMANDS = list(all_commands())


def name_of(value: object) -> str:
    return " ".join(value) if isinstance(value, tuple) else ""


def help_of(*path: str, columns: int = 200) -> str:
    result = tandem(*path, "--help", columns=columns)
    assert result.exit_code == 0, result.output
    return ANSI.sub("", result.stdout)


def shown_options(command: Any) -> list[str]:
    """Return the options and arguments that help mentions; --subsets went, and is hidden."""
    shown = [each for each in command.params if not getattr(each, "hidden", False)]
    return [name for each in shown for name in (*each.opts, *each.secondary_opts)]


def test_the_commands_that_there_are():
    named = {"serve", "classify", "models", "models list", "models verify"}
    assert {" ".join(path) for path, _ in COMMANDS} >= named
    text = help_of()
    for path, _ in COMMANDS:
        assert path[0] in text


@pytest.mark.parametrize(("path", "command"), COMMANDS, ids=name_of)
def test_help_explains_the_command_and_mentions_each_option(path, command):
    text = help_of(*path)
    assert command.help
    for name in shown_options(command):
        assert name.lower() in text.lower()


@pytest.mark.parametrize(("path", "command"), COMMANDS, ids=name_of)
def test_help_flows_in_a_terminal_of_80_columns_and_cuts_no_name(path, command):
    text = help_of(*path, columns=80)
    for name in shown_options(command):
        assert name.lower() in text.lower()
    assert "[env var" not in text
    if hasattr(command, "commands"):
        assert "..." not in text.partition("--help")[2]  # of the first sentences
    head = re.split(r"\n *(?:Options|Arguments|Commands):", text)[0].strip()
    for paragraph in head.split("\n\n")[1:]:
        for line, after in itertools.pairwise([line.strip() for line in paragraph.splitlines()]):
            assert len(f"  {line} {after.split()[0]}") > 78 or "-" in after.split()[0]


def test_help_lists_every_command_once_in_a_section_with_an_example():
    listed = help_of().partition("--help")[2]
    names = re.findall(r"^  ([a-z-]+) {2,}\w", listed, re.M)
    group: Any = get_command(cli.app)
    assert sorted(names) == sorted(group.commands)
    for title, (example, _) in cli.SECTIONS.items():
        assert f"\n{title}:\n" in listed
        assert f"  $ {example}\n" in listed
        command, *words = example.split()
        assert command == "tandem"
        path = tuple(words[:2]) if words[0] in cli.GROUPS else tuple(words[:1])
        options = {word for word in words if word.startswith("--")}
        assert options <= set(shown_options(dict(COMMANDS)[path]))


@pytest.mark.parametrize("name", ["list", "verify", "promote"])
def test_a_name_of_another_group_is_answered_with_the_group(name):
    result = tandem(name, columns=80)
    assert result.exit_code == 2
    group = "traffic" if name == "promote" else "models"
    assert f"No such command '{name}'. Did you mean tandem {group} {name}?" in result.output


def test_a_name_of_no_group_is_answered_without_a_guess():
    assert "No such command 'serf'" in tandem("serf").output


def test_the_version():
    result = tandem("--version")
    assert (result.exit_code, result.stdout) == (0, f"tandem {version('tandem-serve')}\n")


@pytest.mark.parametrize(("argument", "num_ours"), [("--version", 9), ("--help", 11)])
def test_only_a_command_that_is_called_is_imported(argument: str, num_ours: int) -> None:
    script = (
        "import sys; from app.cli.main import main; sys.argv = ['tandem', sys.argv[1]]\n"
        "try: main()\nfinally: print(*sys.modules, file=sys.stderr)"
    )
    command = [sys.executable, "-c", script, argument]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    imported = [name.partition(".")[0] for name in done.stderr.split()]
    ours = [name for name in imported if name in ("app", "models", "calibration", "tandem_client")]
    assert 3 < len(ours) <= num_ours
    assert {"openvino", "ray", "fastapi", "numpy", "rich"}.isdisjoint(imported)
    assert ("pydantic" in imported) == (argument == "--version")  # Typer's, to read any value


@pytest.mark.parametrize("name", ["evaluate", "serve"])
def test_the_listed_sentence_is_the_first_of_the_commands_help(name: str) -> None:
    """It is read from the source, without an import."""
    group: Any = get_command(cli.app)
    listed = group.commands[name]
    assert cli.docstring(listed._entry) == listed.loaded.help
    assert listed.get_short_help_str() == listed.loaded.help.partition(".")[0] + "."


def test_help_is_shown_without_a_command_and_an_entry_point_must_exist():
    with pytest.raises(LookupError, match=r"app\.cli\.main defines no function nothing"):
        cli.docstring(EntryPoint("x", "app.cli.main:nothing", ""))
    assert "Usage" in tandem().output


def main(monkeypatch, *arguments: str) -> int | str | None:
    monkeypatch.setattr(sys, "argv", ["tandem", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return caught.value.code


@pytest.mark.parametrize("path", ["nothing.jpg", "odd[/]name", "[red]x.jpg"])
def test_an_error_is_one_line_and_exit_code_2(monkeypatch, capsys, path):
    assert main(monkeypatch, "classify", path) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", f"tandem: no such file or folder: {path}\n")


def test_a_wrong_option_or_configuration_is_exit_code_2(monkeypatch, capsys, tmp_path):
    assert main(monkeypatch, "classify", "x", "--top-k", "0") == 2
    assert "--top-k" in ANSI.sub("", capsys.readouterr().err)
    path = tmp_path / "c.yaml"
    path.write_text("aplications: []\n")
    assert main(monkeypatch, "serve", "--config", str(path)) == 2
    assert "did you mean applications?" in capsys.readouterr().err


@cases("arguments, option", ((), "TANDEM_PORT"), (("--port", "x"), "'--port'"))
def test_a_bad_value_of_a_variable_is_not_said_to_be_an_options(monkeypatch, arguments, option):
    monkeypatch.setenv("TANDEM_PORT", "tcp://10.0.0.1:80")
    result = tandem("serve", *arguments)
    assert result.exit_code == 2
    assert f"Invalid value for {option}: " in result.output


def test_a_default_that_means_all_is_no_zero():
    text = " ".join(help_of("evaluate").split())
    assert "a random sample this large, not recorded (default: all)" in text
    assert "[default: 0" not in text


# What is opened next must not have the number of a stream; and what is said goes nowhere.
SCRIPT = """
import os, sys
from app.cli.main import main
sys.argv = ["tandem", "serve", "--config", "/nowhere.yaml"]
try:
    main()
except SystemExit as end:
    code = end.code
opened = os.open("/dev/null", os.O_RDONLY)
os.write(int(os.environ["REPORT"]), f"{code} {opened > 2} {sys.stderr is not None}".encode())
"""


@pytest.mark.slow  # make test starts commands with streams in tests/unit/cli
@pytest.mark.parametrize("closed", ["2>&-", "1>&-", "0<&-", "0<&- 1>&- 2>&-"])
def test_closed_streams_are_nothings(closed: str, tmp_path) -> None:
    report = tmp_path / "report"
    shell = ["bash", "-c", f'export REPORT=9; exec 9>\'{report}\'; exec "$0" -c "$1" {closed}']
    subprocess.run([*shell, sys.executable, SCRIPT], check=True, stdin=subprocess.DEVNULL)
    assert report.read_text() == "2 True True"


def test_every_name_is_printed_whatever_the_encoding(monkeypatch) -> None:
    """A photograph's name may be any bytes, and a table comes after all the work."""
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, "latin-1", write_through=True))
    cli.print_every_name()
    print("日 \udcff.jpg")
    assert printed.getvalue() == b"\\u65e5 \\udcff.jpg\n"


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
