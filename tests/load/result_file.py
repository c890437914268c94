"""The result of a benchmark: shown, and kept in a file."""

import json
from pathlib import Path
from typing import Any

import typer


def write_result(result: dict[str, Any], json_file: Path | None) -> None:
    """Print ``result`` as JSON, and write it to ``json_file`` if there is one."""
    text = json.dumps(result, indent=2)
    typer.echo(text)
    if json_file:
        json_file.write_text(text + "\n", "utf-8")
