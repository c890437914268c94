"""Names the extra to install when an optional dependency is missing."""

from collections.abc import Iterator
from contextlib import contextmanager

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
