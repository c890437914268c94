"""The log of ``tandem serve`` on stderr: text, or a JSON object per line as in Ray's logs.

Stages and Serve's controller log only to Serve's files, which are followed here. Of Ray's and
Serve's own lines only warnings and errors are shown, unless the level is debug.
"""

import json
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, TextIO

from rich.console import Console
from rich.markup import escape

from models.errors import TandemError

LogFormat = Literal["json", "text"]
LogLevel = Literal["debug", "info", "warning", "error"]
logger = logging.getLogger("tandem")
# Silent when logging JSON.
console = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False)
LOOK_EVERY_S = 1.0
SERVE, CONTROLLER = "ray.serve", "ray.serve.controller"  # whose lines are not this program's
FILES = "session_[0-9]*/logs/serve/*.log*"  # rotated files too
ASCTIME = logging.Formatter()
STYLES = {logging.WARNING: "yellow", logging.ERROR: "red", logging.CRITICAL: "red"}


def level_of(record: logging.LogRecord) -> int:
    """Return how important a record is; Ray's own news are for who looks for a fault."""
    is_rays = record.name == "ray" or record.name.startswith("ray.")
    return logging.DEBUG if is_rays and record.levelno < logging.WARNING else record.levelno


class JsonLines(logging.StreamHandler[TextIO]):
    """Writes the keys of Ray's formatter, and ``fields`` of the record.

    It does not use a formatter, since Ray replaces the formatters of its loggers' handlers.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return one line; a record from a followed log already is one."""
        if (line := getattr(record, "line", None)) is not None:
            return str(line)
        content = {
            "asctime": ASCTIME.formatTime(record),
            "levelname": record.levelname,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            content["exc_text"] = ASCTIME.formatException(record.exc_info)
        return json.dumps(content, default=str)


class ConsoleLines(logging.Handler):
    """Prints lines in colour, without the controller's warnings, which assume a cluster."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == CONTROLLER and record.levelno == logging.WARNING:
            return
        with suppress(OSError):  # the terminal was closed
            console.print(escape(record.getMessage()), style=STYLES.get(record.levelno))


@contextmanager
def service_log(asked: LogFormat | None, level: LogLevel | None = None) -> Iterator[LogFormat]:
    """Configure the log during the block; an error that ends the block is the last line.

    Without ``asked`` it is text in a terminal and JSON otherwise. Without ``level`` JSON has info,
    and text has warnings, since the progress is shown too. Yields the format.
    """
    log_format: LogFormat = asked or ("text" if sys.stderr.isatty() else "json")
    handler = JsonLines() if log_format == "json" else ConsoleLines()
    least = getattr(logging, (level or ("info" if log_format == "json" else "warning")).upper())
    handler.addFilter(lambda record: level_of(record) >= least)
    console.quiet = log_format == "json"
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.DEBUG)
    try:
        yield log_format
    except Exception as error:
        if log_format == "text":
            raise
        code = error.code if isinstance(error, TandemError) else None
        text = error.message if isinstance(error, TandemError) else repr(error)
        text = " ".join((text, *getattr(error, "__notes__", ())))
        logger.error(text, exc_info=None if code else error, extra={"fields": {"code": code}})
        raise SystemExit(2 if code else 1) from None
    finally:
        console.quiet = False
        logger.handlers, logger.propagate = [], True


def take_over_rays_lines() -> None:
    """Let messages of Ray's library in this process appear in this log; requires imported Ray."""
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).handlers = list(logger.handlers)


@contextmanager
def followed(folder: Path) -> Iterator[None]:
    """Log the new lines of Serve's files below Ray's ``folder`` during the block."""
    is_over, logs = threading.Event(), ServeLogs(folder)

    def follow() -> None:
        while not is_over.wait(LOOK_EVERY_S):
            logs.read_new()

    thread = threading.Thread(target=follow, name="serve-logs", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        logs.read_new()


class ServeLogs:
    """The files of Serve's log by inode, since a rotated file changes its name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[int, int] = {}  # bytes read, by inode

    def read_new(self) -> None:
        """Log the lines that were added since the last call."""
        for path in sorted(self._folder.glob(FILES)):
            try:
                self._read_file(path)
            except OSError as error:  # the file was rotated away
                logger.debug("%s: %s", path, error)

    def _read_file(self, path: Path) -> None:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            begin = self._read.get(status.st_ino, 0)
            begin = begin if begin <= status.st_size else 0  # the inode was reused for another file
            file.seek(begin)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._read[status.st_ino] = begin + len(whole + newline)
        for line in whole.decode("utf-8", "replace").splitlines():
            logger.handle(record_of(line))


def record_of(line: str) -> logging.LogRecord:
    """Return a record for a line of Serve's: JSON unchanged, text as the message."""
    try:
        content: dict[str, Any] = dict(json.loads(line))
    except (ValueError, TypeError):
        content = {"levelname": line.partition(" ")[0], "message": line}
        line = json.dumps(content)
    level = logging.getLevelNamesMapping().get(str(content.get("levelname")), logging.INFO)
    name = "tandem" if content.pop("tandem", False) else SERVE
    said = str(content.get("message"))
    # The controller advises against loopback; a replica takes the next port.
    if level == logging.WARNING and ("HTTPOptions.host=" in said or "Retrying..." in said):
        level = logging.INFO
    elif "deployment" not in content and name == SERVE:
        name = CONTROLLER
    who = content.get("deployment") or content.get("component_name") or "Serve"
    text = f"{who}: {content.get('message')}"
    return logging.makeLogRecord({"name": name, "levelno": level, "msg": text, "line": line})
