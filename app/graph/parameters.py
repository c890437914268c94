"""Checks the parameters of a request, the same over HTTP and gRPC."""

import math

from app.errors import BadParameterError
from app.messages import Fault
from models.errors import TandemError

TIMEOUT_HEADER = "x-request-timeout-seconds"
SHOWN = 40  # characters of a client's value that an error repeats

# What a client is told when the fault is ours; the exception itself is the log's.
UNEXPECTED = Fault(
    500,
    TandemError.code,
    "an error inside the service; its log has the details under this request id",
)


def checked_top_k(top_k: int, num_classes: int) -> int:
    """Return how many classes are asked for.

    Raises:
        BadParameterError: none, or more than there are.

    """
    if not 1 <= top_k <= num_classes:
        raise BadParameterError(
            f"top_k is {str(top_k)[:SHOWN]}; this model set has {num_classes} classes: "
            f"ask for 1 to {num_classes}"
        )
    return top_k


def parse_timeout_s(given: str) -> float:
    """Return the seconds that the client gives its request.

    Raises:
        BadParameterError: ``given`` is no number above 0.

    """
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise BadParameterError(
            f"{TIMEOUT_HEADER} is {given[:SHOWN]!r}; give seconds as a number above 0"
        )
    return seconds
