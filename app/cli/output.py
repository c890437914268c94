"""Checks the files of a command's options before the measurement; writes configurations."""

from pathlib import Path

from app.errors import ConfigError
from app.launch.config import ServeConfig
from models import result_files
from models.extras import needs_extra

PLOTS = (".png", ".svg")


def check_can_write(path: Path | None, *, is_new: bool = False) -> None:
    """Check ``path``; raise :class:`ConfigError` if it exists and must be new."""
    if is_new and path is not None and path.exists():
        raise ConfigError(f"{path} exists; --force overwrites it, or name another file")
    result_files.check_can_write(path)


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


def write_config(path: Path, text: str, *, is_new: bool) -> None:
    """Write a configuration after checking that ``tandem serve`` accepts it.

    Raises:
        ConfigError: it exists although ``is_new``, or is invalid.
        ResultFileError: it cannot be written.

    """
    check_can_write(path, is_new=is_new)
    result_files.write_result(path, text, ServeConfig.read)
