"""Checks that the installed Ray is the one that the application was written for.

It uses names that Ray does not promise to keep (:mod:`app.calls.ray_names`). They are looked up
before anything starts: a name that is gone, or takes other parameters, would otherwise show as a
service that half works.
"""

from collections.abc import Iterable
from importlib.metadata import version

from app.calls.ray_names import REPLICA_NAMES, RayName
from app.errors import ConfigError

SUPPORTED_RAY = "2.60"  # the minor version that pyproject.toml pins


def check_ray(names: Iterable[RayName] = REPLICA_NAMES) -> None:
    """Check the installed Ray's minor version, then every one of ``names``.

    Raises:
        ConfigError: it says which Ray was found, what was expected, and what to install.

    """
    check_ray_version()
    if problems := [problem for name in names if (problem := name.problem())]:
        raise mismatch("; ".join(problems))


def check_ray_version() -> None:
    """Check the installed Ray's minor version, without importing it; raise :class:`ConfigError`."""
    if version("ray").split(".")[:2] != SUPPORTED_RAY.split("."):
        raise mismatch("another minor version has other private names")


def mismatch(found: str) -> ConfigError:
    """Return the error for a Ray that is not as it is used; ``found`` says in what."""
    return ConfigError(
        f"Ray {version('ray')} is installed, and Tandem needs {SUPPORTED_RAY}: {found}; "
        f"pip install 'ray[serve]=={SUPPORTED_RAY}.*'"
    )
