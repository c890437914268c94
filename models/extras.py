"""Names the extra to install when an optional dependency is missing."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from models.errors import TandemError

DISTRIBUTION = "tandem-serve"  # as pip knows the project; "tandem" there is somebody else's


class MissingExtraError(TandemError):
    """A package that only one extra of the project brings is not there."""

    code = "missing_extra"


@contextmanager
def needs_extra(extra: str, what: str) -> Iterator[None]:
    """Turn a failing import inside into an error that says what to install."""
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
    """Raise :class:`MissingExtraError` unless ``package`` is there; it is not imported."""
    if find_spec(package) is None:
        raise MissingExtraError(f"{what} needs {package}, which is not installed; {_how_to(extra)}")


def installed_version(package: str) -> str | None:
    """Return a package's version, without a build's own suffix; None: it is not installed."""
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return None
