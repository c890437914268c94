"""Serve's log on stderr, which pods of a cluster show, in the format of its files.

Ray 2.60 writes text to stderr (``RAY_SERVE_LOG_TO_STDERR``), whatever ``logging_config`` says.
"""

import logging
from logging.handlers import MemoryHandler


def write_to_stderr_as_to_files() -> None:
    """Use the file handler's format for this process's stderr, if it has both."""
    handlers = logging.getLogger("ray.serve").handlers
    files = [(h.target, h.filters) for h in handlers if isinstance(h, MemoryHandler) and h.target]
    for stream in handlers:
        if type(stream) is not logging.StreamHandler:
            continue
        for file, filters in files:
            stream.setFormatter(file.formatter)
            stream.filters = [*stream.filters, *(f for f in filters if f not in stream.filters)]
