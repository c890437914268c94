"""Checks the parameters of a request, alike for HTTP and gRPC."""

import math
import re

from app.errors import MAX_SHOWN, BadParameterError
from app.queueing.priority import Lane

TIMEOUT_HEADER = "x-request-timeout-seconds"
# RFC 9218: urgency 0 to 7, by default 3; other parameters (incremental) are ignored.
URGENCY = re.compile(r"(?:^|,)\s*u\s*=\s*(\d+)\s*(?:;|,|$)")
DEFAULT_URGENCY = 3


def checked_top_k(top_k: int, num_classes: int) -> int:
    """Return ``top_k`` if it is 1 to ``num_classes``, or raise :class:`BadParameterError`."""
    if not 1 <= top_k <= num_classes:
        raise BadParameterError(
            f"top_k is {str(top_k)[:MAX_SHOWN]}; this model set has {num_classes} classes: "
            f"ask for 1 to {num_classes}"
        )
    return top_k


def checked_threshold(threshold: float | None, *, is_multi_label: bool) -> float | None:
    """Return the threshold if it is valid, None for the set's own.

    Raises:
        BadParameterError: it is not between 0 and 1, or the set is not multi-label.

    """
    if threshold is None:
        return None
    shown = str(threshold)[:MAX_SHOWN]
    if not is_multi_label:
        raise BadParameterError(
            f"threshold is {shown}; the classes of this model set exclude each other: leave it out "
            "and ask for top_k classes (a multi-label set has a threshold, see /v1/models)"
        )
    if not 0 < threshold < 1:
        raise BadParameterError(f"threshold is {shown}; give a score above 0 and below 1")
    return threshold


def parse_timeout_s(text: str) -> float:
    """Return the client's time limit in seconds.

    Raises:
        BadParameterError: the text is not a number above 0.

    """
    try:
        seconds = float(text) if text.isascii() and "_" not in text else math.nan
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise BadParameterError(
            f"{TIMEOUT_HEADER} is {text[:MAX_SHOWN]!r}; give seconds as a number above 0"
        )
    return seconds


def lane_of(priority: str | None, num_images: int) -> Lane:
    """Return a request's lane: bulk for several images, unless a Priority header decides.

    Raises:
        BadParameterError: the header's urgency is not 0 to 7 (RFC 9218).

    """
    match = URGENCY.search(priority) if priority else None
    if match is None:
        return "bulk" if num_images > 1 else "interactive"
    urgency = int(match[1][:3])
    if urgency > 7:
        raise BadParameterError(f"priority is {priority[:40]!r}; its urgency u is 0 to 7")  # type: ignore[index]
    return "interactive" if urgency <= DEFAULT_URGENCY else "bulk"
