"""Writes result files: checks them before the measurement, and writes atomically after it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from app.errors import ConfigError
from app.launch.config import ServeConfig
from models import whole_file
from models.extras import needs_extra

PLOTS = (".png", ".svg")


def check_can_write(path: Path | None, *, is_new: bool = False) -> None:
    """Raise :class:`ConfigError` if ``path`` cannot be written, or exists and must be new."""
    if path is None or str(path) == "-":
        return
    if is_new and path.exists():
        raise ConfigError(f"{path} exists; --force overwrites it, or name another file")
    try:
        whole_file.check_can_write(path)
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}; name a file in a folder that can be written"
        ) from error


def check_can_plot(path: Path | None, command: str) -> None:
    """Check that ``command --plot`` can draw into ``path``, before minutes of measuring.

    Raises:
        ConfigError: the file cannot be written, or has another suffix than ``PLOTS``.
        MissingExtraError: matplotlib is not installed.

    """
    check_can_write(path)
    if path is None:
        return
    if path.suffix.lower() not in PLOTS:
        raise ConfigError(f"--plot {path}: a name that ends with {' or '.join(PLOTS)}")
    with needs_extra("calibrate", f"{command} --plot"):
        import matplotlib  # noqa: F401


def write_config(path: Path, text: str, *, is_new: bool) -> None:
    """Write a configuration after checking that ``tandem serve`` accepts it.

    Raises:
        ConfigError: it cannot be written, exists although ``is_new``, or is invalid.

    """
    check_can_write(path, is_new=is_new)
    write_whole(path, text, ServeConfig.read)


def write_whole(path: Path, text: str, check: Callable[[Path], object] = lambda _: None) -> None:
    """Write a file in one step, if ``check`` accepts it.

    Raises:
        ConfigError: the file cannot be written.

    """
    try:
        whole_file.write_whole(path, text, check)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; name another file") from error


def write_json(path: Path | None, content: dict[str, Any]) -> None:
    """Write the file of ``--json``; ``-`` is stdout, and None writes nothing."""
    text = json.dumps(content, indent=2)
    if str(path) == "-":
        typer.echo(text)
    elif path is not None:
        write_whole(path, text + "\n")
