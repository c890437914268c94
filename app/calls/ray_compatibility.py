"""Checks that the service can run with the installed Ray, and names features that Ray lacks.

The application uses names that Ray does not promise to keep (:mod:`app.calls.ray_names`). They are
looked up before any is imported. A missing name, or other parameters, would otherwise show as a
service that half works.
"""

from collections.abc import Iterable
from importlib.metadata import version

from app.calls.ray_features import REPLICA_FEATURES
from app.calls.ray_names import Feature
from app.errors import ConfigError

# The minor versions that pass the tests; pyproject.toml allows one more.
TESTED_RAY = ("2.59", "2.60")


def check_ray(features: Iterable[Feature] = REPLICA_FEATURES) -> list[str]:
    """Check every feature separately.

    Returns:
        A warning for each feature that is left out, and for an untested version.

    Raises:
        ConfigError: Ray is too old, or lacks a required feature. The message has Ray's version, the
            expected one, and what to install.

    """
    untested = check_ray_version()
    warnings = [] if untested is None else [untested]
    refused = []
    for feature in features:
        if (problem := feature.problem()) is None:
            continue
        if feature.is_required:
            refused.append(f"{problem} ({feature.name}: {feature.without})")
        else:
            warnings.append(
                f"Ray {version('ray')}: {problem}. Left out: {feature.name}: {feature.without}"
            )
    if refused:
        raise mismatch("; ".join(refused))
    return warnings


def check_ray_version() -> str | None:
    """Return a warning if the installed Ray is newer than tested; does not import it.

    Raises:
        ConfigError: Ray is older than every tested version.

    """
    installed = _minor(version("ray"))
    if installed < _minor(TESTED_RAY[0]):
        raise mismatch("an older version has other private names")
    if installed > _minor(TESTED_RAY[-1]):
        return (
            f"Ray {version('ray')} is newer than the versions that Tandem was tested with "
            f"({', '.join(TESTED_RAY)}): where something fails, {_install()}"
        )
    return None


def mismatch(problem: str) -> ConfigError:
    """Return the error for a Ray that the service cannot run with; ``problem`` says why."""
    return ConfigError(
        f"Ray {version('ray')} is installed, and Tandem needs {TESTED_RAY[0]} or later: {problem}; "
        f"{_install()}"
    )


def _install() -> str:
    return f"pip install 'ray[serve]=={TESTED_RAY[-1]}.*'"


def _minor(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])
