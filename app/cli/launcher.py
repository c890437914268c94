"""The ``tandem`` command and ``tandem.load``, which make the project's packages importable.

In a wheel this module is ``tandem/__init__.py``, and all packages are inside ``tandem``: otherwise
an installation would add top-level packages ``app``, ``models`` and ``calibration``. In a checkout
(``pip install -e .``) they are importable already.
"""

import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

FOLDER = Path(__file__).resolve().parent


def main() -> None:
    """Run the command line. In a wheel, Ray's processes get the packages' folder too.

    The client's folder is only added here, since only the command line uses it.
    """
    if (FOLDER / "app").is_dir():
        sys.path[:0] = [str(FOLDER), str(FOLDER / "client")]
        from app.environment import add_import_path

        add_import_path(FOLDER)
    from app.cli.main import main as run

    run()


def load(
    name: str = "imagenette",
    precision: Literal["INT8", "FP16", "auto"] | None = None,
    plan: Literal["full", "fast"] = "full",
    embedding: str | None = None,
) -> Any:
    """Load a model set's ensemble into this process: ``load().classify("photo.jpg").label``.

    ``name`` is a set's name or its folder. ``precision`` None is that of TANDEM_PRECISION; without
    it INT8, or the float networks of a set that has no INT8. ``plan`` fast asks fewer members, by
    the set's fast plan. Answers have the pooled features of the member ``embedding``, if it is
    named. Returns a ``LocalEnsemble`` (``calibration/offline.py``). Modules of the program precede
    those of the wheel.

    Raises:
        ImportError: the program has its own module ``models`` or ``calibration``.
        models.errors.ModelSetError: no set has that name, it fails its checks, or it has no fast
            plan.
    """
    if (FOLDER / "app").is_dir():
        if str(FOLDER) not in sys.path:
            sys.path.append(str(FOLDER))
        for package in ("models", "calibration"):
            spec = find_spec(package)  # Python prefers ours to a folder without __init__.py
            origin = spec and spec.origin
            if origin and not (FOLDER / package / "__init__.py").samefile(origin):
                raise ImportError(
                    f"tandem.load needs its own module {package}, but this program has another one "
                    f"({origin}): run tandem classify-offline, or use tandem_client with a "
                    "service"
                )
    (entry,) = entry_points(group="tandem.offline", name="load")  # app never imports calibration
    return entry.load()(name, precision, plan, embedding)
