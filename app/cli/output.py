"""Results as files: checked before the measurement, written atomically after it."""

import contextlib
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import typer

from app.errors import ConfigError
from app.launch.config import ServeConfig
from models.cpus import available_cpus, cpu_model
from models.extras import DISTRIBUTION

PACKAGES = ["ray", "openvino", "opencv-python-headless", "numpy", "fastapi", "uvicorn"]


def check_can_write(path: Path | None, *, is_new: bool = False) -> None:
    """Raise :class:`ConfigError` if ``path`` cannot be written, or exists and must be new."""
    if path is None or str(path) == "-":
        return
    if path.is_dir():
        raise ConfigError(f"cannot write {path}: it is a folder; name a file in it")
    if is_new and path.exists():
        raise ConfigError(f"{path} exists; --force overwrites it, or name another file")
    try:
        with tempfile.TemporaryFile(dir=path.absolute().parent):
            pass
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(13, "it is read-only")
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}; name a file in a folder that can be written"
        ) from error


def write_config(path: Path, text: str, *, is_new: bool) -> None:
    """Write a configuration once ``tandem serve`` would read it.

    Raises:
        ConfigError: it cannot be written, exists although ``is_new``, or is not valid.

    """
    check_can_write(path, is_new=is_new)
    write_whole(path, text, ServeConfig.read)


def write_whole(path: Path, text: str, check: Callable[[Path], object] = lambda _: None) -> None:
    """Write a file in one step, if ``check`` accepts it; nobody ever sees half of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, "utf-8")
        check(partial)
        partial.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; name another file") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def write_json(path: Path | None, content: dict[str, Any]) -> None:
    """Write the file of ``--json``; - is stdout, None nothing."""
    text = json.dumps(content, indent=2)
    if str(path) == "-":
        typer.echo(text)
    elif path is not None:
        write_whole(path, text + "\n")


def describe_machine() -> dict[str, Any]:
    """Return command, time, CPU and versions, to be stored with every result."""
    return {
        "command": " ".join(["tandem", *sys.argv[1:]]),
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "cores": available_cpus(),
        "python": platform.python_version(),
        "versions": {package: version(package) for package in (DISTRIBUTION, *PACKAGES)},
    }
