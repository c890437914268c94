"""What ``tandem serve`` tells the outside: its log on stderr, and Ray's metrics through a relay.

**The log** is text, or a JSON object per line as in Ray's logs. Stages and Serve's controller log
only to Serve's files, which are followed here. Of Ray's and Serve's own lines only warnings and
errors are shown, unless the level is debug.

**The metrics.** Ray's agent serves one connection at a time and waits for it without end. So no
caller reaches the agent itself: under :mod:`app.launch.forks` it listens on a socket in the run's
folder, which other users of the machine cannot enter. Elsewhere it listens on a port of loopback.
The relay has limits of time and of number.
"""

import asyncio
import json
import logging
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal, TextIO

from rich.console import Console
from rich.markup import escape

from app.access import Keys
from app.errors import UnauthorizedError
from app.launch.checks import joined
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
METRICS_PATH = "/metrics"
# For a liveness probe, which no crowd of callers of the service keeps from its answer.
LIVE_PATH = "/livez"
MAX_CONNECTIONS = 32  # enough for two Prometheus servers and some people
REQUEST_WITHIN_S = 2.0  # a scrape's request is one packet
ANSWER_WITHIN_S = 10.0  # from the connection to the answer's last byte; Prometheus' own limit
SCRAPED_WITHIN_S = 9.0
MAX_REQUEST_BYTES = 8192
ASKED = f"GET {METRICS_PATH} HTTP/1.0\r\n\r\n".encode()
Source = Path | int  # the agent's socket, or its port on loopback


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


class _Relay:
    """Answers one request for each connection; all methods run on one event loop."""

    def __init__(self, source: Source, keys: Keys) -> None:
        self._source, self._keys = source, keys
        # By arrival: whether the request is complete.
        self._open: dict[asyncio.Task[None] | None, bool] = {}
        self._scrape: asyncio.Task[bytes] | None = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer a connection; with all places taken the slowest of the others is closed."""
        if len(self._open) >= MAX_CONNECTIONS:
            slow = (task for task, is_complete in self._open.items() if not is_complete)
            oldest = next(slow, next(iter(self._open)))
            del self._open[oldest]
            assert oldest is not None  # each is the task of a connection
            oldest.cancel()
        self._open[me := asyncio.current_task()] = False
        # A client that is slow, or that hangs up, is no matter for the log.
        errors = (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError)
        try:
            with suppress(*errors, asyncio.CancelledError):  # Python 3.11 logs what is cancelled
                async with asyncio.timeout(ANSWER_WITHIN_S):
                    async with asyncio.timeout(REQUEST_WITHIN_S):
                        head = await reader.readuntil(b"\r\n\r\n")
                    self._open[me] = True
                    writer.write(await self._answer(head.decode("latin-1")))
                    await writer.drain()
                    writer.close()
                    await writer.wait_closed()
        finally:
            self._open.pop(me, None)
            # asyncio has no loop for a transport that sent its last bytes after close().
            with suppress(AttributeError):
                writer.transport.abort()

    async def _answer(self, head: str) -> bytes:
        request, *lines = head.split("\r\n")
        method, _, target = request.partition(" ")
        path = target.partition(" ")[0].partition("?")[0]
        if path == LIVE_PATH:
            return _text(HTTPStatus.OK, "tandem serve runs")
        fields = (line.partition(":") for line in lines)
        sent = [value.strip() for name, _, value in fields if name.lower() == "authorization"]
        try:
            self._keys.check(sent)
        except UnauthorizedError as error:
            return _text(HTTPStatus.UNAUTHORIZED, error.message, "WWW-Authenticate: Bearer\r\n")
        if path != METRICS_PATH:
            return _text(HTTPStatus.NOT_FOUND, f"only {METRICS_PATH} is here")
        if method != "GET":
            return _text(HTTPStatus.METHOD_NOT_ALLOWED, "only GET is answered", "Allow: GET\r\n")
        # Those who ask at the same time share an answer, so a crowd costs the agent no more.
        if self._scrape is None or self._scrape.done():
            self._scrape = asyncio.create_task(self._scraped())
        return await asyncio.shield(self._scrape)

    async def _scraped(self) -> bytes:
        """Return the agent's answer as it is, with its head."""
        try:
            async with asyncio.timeout(SCRAPED_WITHIN_S):
                if isinstance(self._source, Path):
                    reader, writer = await asyncio.open_unix_connection(self._source)
                else:
                    reader, writer = await asyncio.open_connection("127.0.0.1", self._source)
                try:
                    writer.write(ASKED)
                    if answer := await reader.read():
                        return answer
                    raise ConnectionError("it closed the connection")
                finally:
                    writer.close()
        except OSError as error:  # TimeoutError is one
            why = error.strerror or str(error) or f"none within {SCRAPED_WITHIN_S:g} s"
            return _text(HTTPStatus.SERVICE_UNAVAILABLE, f"no metrics from Ray's agent: {why}")


def _text(status: HTTPStatus, text: str, fields: str = "") -> bytes:
    head = f"HTTP/1.0 {status.value} {status.phrase}\r\nContent-Type: text/plain; charset=utf-8\r\n"
    return f"{head}{fields}Content-Length: {len(text.encode()) + 1}\r\n\r\n{text}\n".encode()


@contextmanager
def metrics_relay(host: str, port: int, source: Source, keys: Keys) -> Iterator[str]:
    """Relay ``GET /metrics`` of ``host:port`` to ``source``, and answer /livez; yield the address.

    Raises:
        OSError: the process cannot listen on ``host:port``.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)
    relay, loop, stop = _Relay(source, keys), asyncio.new_event_loop(), asyncio.Event()

    async def listen() -> None:
        await asyncio.start_server(relay.serve, sock=listener, limit=MAX_REQUEST_BYTES)
        await stop.wait()

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:  # which cancels what is left
            runner.run(listen())

    thread = threading.Thread(target=run, name="metrics", daemon=True)
    thread.start()
    try:
        yield f"http://{joined(host, port)}{METRICS_PATH}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        listener.close()
