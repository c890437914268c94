"""The ``tandem`` command: makes the project's packages importable, then runs the command line.

A wheel has this module as ``tandem/__init__.py`` and all the rest beside it, so that an
installation has no ``app``, ``models`` or ``calibration`` that other programs could import. In a
checkout (``pip install -e .``) they are importable as they are.
"""

import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def main() -> None:
    """Run the command line; of a wheel, what Ray starts is told where the packages are.

    The client, which only the command line uses, is found by this process alone.
    """
    if (FOLDER / "app").is_dir():
        sys.path[:0] = [str(FOLDER), str(FOLDER / "client")]
        from app.environment import add_import_path

        add_import_path(FOLDER)
    from app.cli.main import main as run

    run()
