"""``tandem`` in this process, its output wide (or not) and without colours."""

from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner, Result

from app.cli.main import app


def tandem(*arguments: object, columns: int = 200) -> Result:
    """Run a command; the result has its output, exit code and exception."""
    runner = CliRunner(env={"COLUMNS": str(columns), "NO_COLOR": "1"})
    return runner.invoke(app, [str(a) for a in arguments])


def options_of(command: str) -> set[str]:
    """Return the options that a command takes, with their dashes."""
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    return {option for parameter in group.commands[command].params for option in parameter.opts}
