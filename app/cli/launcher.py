"""The ``tandem`` command, and ``tandem.load``: they make the project's packages importable.

A wheel has this module as ``tandem/__init__.py`` and all the rest beside it, so that an
installation has no ``app``, ``models`` or ``calibration`` that other programs could import. In a
checkout (``pip install -e .``) they are importable as they are.
"""

import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

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


def load(name: str = "imagenette", precision: Literal["INT8", "FP16"] = "INT8") -> Any:
    """Load a model set's ensemble into this process: ``load().classify("photo.jpg").label``.

    ``name`` is a set's name or its folder. Returns a ``LocalEnsemble``
    (``calibration/offline/local_ensemble.py``). A wheel's packages are found behind the program's.

    Raises:
        ImportError: the program has a module ``models`` or ``calibration`` of its own.
        models.errors.ModelSetError: there is no such set, or it must not answer here.

    """
    if (FOLDER / "app").is_dir() and str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    for package in ("models", "calibration"):
        spec = find_spec(package)
        origin = Path((spec and spec.origin) or "")
        if (FOLDER / "app").is_dir() and origin.resolve().parents[1] != _place_of(package):
            raise ImportError(
                f"tandem.load needs its own module {package}, and this program has another one "
                f"({origin}): run tandem classify --offline, or ask a service by tandem_client"
            )
    (entry,) = entry_points(group="tandem.offline", name="load")  # app never imports calibration
    return entry.load()(name, precision)


def _place_of(package: str) -> Path:
    return (FOLDER / package).resolve().parent
