"""Relays Ray's metrics to whoever may read them, within limits of time and of number.

Ray's agent serves one connection at a time and waits for it without end. So no caller reaches the
agent itself: under :mod:`app.launch.forks` it listens on a socket in the run's folder, which other
users of the machine cannot enter. Elsewhere it listens on a port of loopback.
"""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from pathlib import Path

from app.access import Keys
from app.errors import UnauthorizedError
from app.launch.checks import joined

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
