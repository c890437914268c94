"""``tandem`` in this process, its output wide (or not) and without colours."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command
from typer.testing import CliRunner, Result

from app.cli.main import ListedCommand, app


def tandem(*arguments: object, columns: int = 200) -> Result:
    runner = CliRunner(env={"COLUMNS": str(columns), "NO_COLOR": "1"})
    return runner.invoke(app, [str(a) for a in arguments])


def all_commands(group: Any = None, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every command and group below ``tandem`` with its path, each with its parameters."""
    for name, command in (group or get_command(app)).commands.items():
        if isinstance(command, ListedCommand):
            yield (*path, name), command.loaded
        else:
            yield (*path, name), command
            yield from all_commands(command, *path, name)


def options_of(*path: str) -> set[str]:
    parameters = dict(all_commands())[path].params
    return {option for parameter in parameters for option in parameter.opts}


def classify_offline(model_set: Path, *arguments: object, exit_code: int = 0) -> str:
    """Return what ``tandem classify-offline`` printed; it must end with ``exit_code``."""
    done = tandem("classify-offline", "--model-set", model_set, *arguments)
    assert done.exit_code == exit_code, done.output
    return done.output
