"""``tandem`` in this process, its output wide (or not) and without colours."""

from typer.testing import CliRunner, Result

from app.cli.main import app


def tandem(*arguments: object, columns: int = 200) -> Result:
    """Run a command; the result has its output, exit code and exception."""
    runner = CliRunner(env={"COLUMNS": str(columns), "NO_COLOR": "1"})
    return runner.invoke(app, [str(a) for a in arguments])
