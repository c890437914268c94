"""Command-line options that several commands share, and parsers of their values."""

from pathlib import Path
from typing import Annotated

import typer
from platformdirs import user_data_path
from rich.console import Console

from models.errors import ModelSetError
from models.result_files import ResultFileError, check_can_write
from models.user_folders import needed_folder

err = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False)
out = Console(soft_wrap=True, highlight=False, emoji=False)

SetName = Annotated[str, typer.Argument(metavar="SET", help="name of a set, or its folder")]
ModelDirs = Annotated[
    list[Path] | None, typer.Option(help="searched before the user's and the bundled sets")
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="write the result as JSON; - is stdout")
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of a table")]
Into = Annotated[Path | None, typer.Option(help="folder of sets  (default: the user's own)")]
Replace = Annotated[bool, typer.Option(help="a set of that name, if there is one")]


def pairs(texts: list[str], option: str) -> list[tuple[str, str]]:
    """Split NAME=VALUE options."""
    values = []
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals and value):
            raise ModelSetError(f"{option} {text!r}: write NAME=VALUE")
        values.append((key, value))
    return values


def triple(text: str, option: str) -> tuple[float, float, float]:
    """Read three finite numbers, one per channel."""
    parts = [number(part, option) for part in text.split(",")]
    if len(parts) == 1:
        parts *= 3
    if len(parts) != 3 or (option == "--scale" and 0 in parts):
        raise ModelSetError(f"{option} {text!r}: write one number, or three for three channels")
    return parts[0], parts[1], parts[2]


def number(text: str, option: str) -> float:
    """Read a finite number."""
    try:
        value = float(text)
    except ValueError:
        raise ModelSetError(f"{option}: {text!r} is not a number") from None
    if not abs(value) < 1e9:  # NaN and infinity too
        raise ModelSetError(f"{option}: {text} is no finite number")
    return value


def check_file(path: Path | None, option: str) -> None:
    """Raise :class:`ResultFileError` unless the option's file can be written; - is none."""
    if str(path) == "-":
        raise ResultFileError(f"{option} - is no file; name one")
    check_can_write(path)


def user_sets_dir() -> Path:
    """Return the folder where fetched and added sets go: ~/.local/share/tandem/models on Linux."""
    return needed_folder(user_data_path, "models")
