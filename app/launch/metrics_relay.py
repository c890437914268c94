"""Relays the metrics from Ray's agent on loopback to an address that other machines can reach."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

from app.launch.ports import joined

PATH = "/metrics"
MAX_CONNECTIONS = 8  # enough for two Prometheus servers and some people
TIMEOUT_S = 10.0  # the default of Prometheus


class _Server(ThreadingHTTPServer):
    """Serves ``MAX_CONNECTIONS`` at a time, and closes further connections."""

    daemon_threads = True

    def __init__(self, host: str, port: int, source: str) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.source = source
        self.places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__((host, port), _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing: a client that hangs up is no matter for the log."""


class _Handler(BaseHTTPRequestHandler):
    timeout = TIMEOUT_S
    server: _Server

    def handle(self) -> None:
        if self.server.places.acquire(blocking=False):
            try:
                super().handle()
            finally:
                self.server.places.release()

    def do_GET(self) -> None:
        if self.path != PATH:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", f"only {PATH} is here\n".encode())
            return
        try:
            source = httpx.get(self.server.source, timeout=TIMEOUT_S, trust_env=False)
            source.raise_for_status()
        except httpx.HTTPError as error:
            text = f"no metrics from {self.server.source}: {error}\n"
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", text.encode())
        else:
            self._answer(HTTPStatus.OK, source.headers["content-type"], source.content)

    def _answer(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing, since scrapes come every few seconds."""


@contextlib.contextmanager
def metrics_relay(host: str, port: int, source_port: int) -> Iterator[str]:
    """Relay ``GET /metrics`` of ``host:port`` to ``source_port`` on loopback; yield the address.

    Raises:
        OSError: the process cannot listen on ``host:port``.

    """
    with _Server(host, port, f"http://127.0.0.1:{source_port}{PATH}") as server:
        thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
        thread.start()
        try:
            yield f"http://{joined(host, port)}{PATH}"
        finally:
            server.shutdown()
            thread.join()
