"""Names the extra to install when an optional dependency is missing."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from models.errors import TandemError


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
            f"tandem {what} needs {error.name}, which serving does not install; "
            f"pip install -c constraints.txt 'tandem[{extra}]' (in a checkout: -e '.[{extra}]')"
        ) from error


def check_installed(package: str, extra: str, what: str) -> None:
    """Raise :class:`MissingExtraError` unless ``package`` is there; it is not imported."""
    if find_spec(package) is None:
        raise MissingExtraError(
            f"{what} needs {package}, which is not installed; "
            f"pip install -c constraints.txt 'tandem[{extra}]' (in a checkout: -e '.[{extra}]')"
        )


def installed_version(package: str) -> str | None:
    """Return a package's version, without a build's own suffix; None: it is not installed."""
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return None
