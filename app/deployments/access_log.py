"""Serve's access log where it is switched off: no record is made.

With ``enable_access_log: false`` Serve still makes a record of every request, with the caller's
frame and a dozen fields, which a filter of its handlers then drops: a twentieth of what the event
loop does for an image.
"""

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any

MARK = "serve_access_log"  # in the ``extra`` of such a record


def skip_filtered_access_log(logger: logging.Logger) -> None:
    """Let ``logger.info`` return at once for what every handler of it would drop.

    The handlers are looked at each time, since Serve sets them anew when its logging is changed
    while it runs. To call it again changes nothing.
    """
    info = logger.info
    if getattr(info, "skips", False):
        return

    def told(message: object, *args: Any, **options: Any) -> None:
        if MARK in (options.get("extra") or {}) and drops_access_log(logger):
            return
        options["stacklevel"] = options.get("stacklevel", 1) + 1  # the caller, not this function
        info(message, *args, **options)

    told.skips = True  # type: ignore[attr-defined]
    logger.info = told  # type: ignore[method-assign, assignment]


def drops_access_log(logger: logging.Logger) -> bool:
    """Whether every handler of ``logger`` would drop a record of Serve's access log.

    The handlers' filters are asked, whatever Serve calls them, and each of them once.
    """
    if logger.propagate:
        return False
    for handler in logger.handlers:  # asked for every request: a generator costs several times that
        filters: list[Any] = handler.filters
        for own in filters:
            if _drops(getattr(own, "filter", own)):
                break
        else:
            return False
    return True


@lru_cache(maxsize=64)
def _drops(keeps: Callable[[logging.LogRecord], Any]) -> bool:
    return not keeps(logging.makeLogRecord({"name": "ray.serve", MARK: True}))
