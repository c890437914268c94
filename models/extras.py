"""Installed packages: versions for results, and which extra has a missing package."""

import platform
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from models.cpus import available_cpus, cpu_model
from models.errors import TandemError

DISTRIBUTION = "tandem-serve"  # the project's name on PyPI; "tandem" there is another project
OF_A_SERVICE = ("ray", "openvino", "opencv-python-headless", "numpy", "fastapi", "uvicorn")


class MissingExtraError(TandemError):
    """A package that only one extra of the project brings is not there."""

    code = "missing_extra"


def describe_machine(further: Iterable[str] = ()) -> dict[str, Any]:
    """Return command, time, CPU and versions, to be stored with a result.

    The versions are of the service's main packages and of ``further`` ones, if installed.
    """
    packages = (DISTRIBUTION, *OF_A_SERVICE, *further)
    return {
        "command": " ".join(["tandem", *sys.argv[1:]]),
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "cores": available_cpus(),
        "python": platform.python_version(),
        "versions": {
            name: installed for name in packages if (installed := installed_version(name))
        },
    }


@contextmanager
def needs_extra(extra: str, what: str) -> Iterator[None]:
    """Turn a failing import in the block into an error that names the extra to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"tandem {what} needs {error.name}, which serving does not install; {_how_to(extra)}"
        ) from error


def pip_install(extra: str) -> str:
    """Return the command that installs an extra."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def _how_to(extra: str) -> str:
    return f"{pip_install(extra)} (in a checkout: pip install -c constraints.txt -e '.[{extra}]')"


def check_installed(package: str, extra: str, what: str) -> None:
    """Raise :class:`MissingExtraError` unless ``package`` is installed; does not import it."""
    if find_spec(package) is None:
        raise MissingExtraError(f"{what} needs {package}, which is not installed; {_how_to(extra)}")


def installed_version(package: str) -> str | None:
    """Return a package's version without a local build suffix; None if it is not installed."""
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return None
