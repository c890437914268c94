"""Checks that ``--plot`` can draw into its file, before the measurement."""

from pathlib import Path

from app.errors import ConfigError
from models.extras import needs_extra
from models.result_files import check_can_write

PLOTS = (".png", ".svg")


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
