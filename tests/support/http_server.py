"""Real HTTP servers on a thread; the tests choose the answers."""

import json
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

Answer = tuple[int, bytes]
PROXIES = ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


def classified(label: str = "tench", probability: float = 0.9) -> dict[str, Any]:
    """Return what the service answers for one image."""
    row = {"index": 0, "label": label, "probability": probability}
    return {
        "model_set": "tiny",
        "predictions": [row],
        "members": {"a": {"label": label, "probability": probability, "predictions": [row]}},
        "agreement": True,
        "degraded": False,
        "request_id": "r1",
        "timings_ms": {"total": 13.1, "stages": []},
    }


class QuietRequest(BaseHTTPRequestHandler):
    """One request; subclasses say how it is answered."""

    def send(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in ({"content_length": str(len(body))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        if self.close_connection:  # unsaid, a client may ask again on it and find it closed
            self.send_header("connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Keep the test's output clean."""


class _Server(ThreadingHTTPServer):
    request_queue_size = 128  # connections at once; what is beyond is lost for seconds

    def handle_error(self, *request: Any) -> None:
        """Say nothing of clients that hung up; what else fails is told as ever."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(*request)


class ThreadedServer:
    """Serves with ``handler`` while the ``with`` block runs."""

    def __init__(self, handler: type[QuietRequest]) -> None:
        self._http = _Server(("127.0.0.1", 0), handler)
        self.port = self._http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


class FakeServer(ThreadedServer):
    """Answers POST and PUT with ``answer(body)`` and GET with ``get``; remembers the requests."""

    def __init__(self) -> None:
        self.answer: Callable[[bytes], Answer] = lambda _: (200, json.dumps(classified()).encode())
        self.get: Answer = (200, b"{}")
        self.requests: list[tuple[str, bytes]] = []
        self.keys: list[str | None] = []  # what each request had as Authorization
        fake = self

        class Request(QuietRequest):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                fake.keys.append(self.headers["authorization"])
                fake.requests.append((self.path, body))
                self.send(*fake.answer(body))

            do_PUT = do_POST

            def do_GET(self) -> None:
                fake.keys.append(self.headers["authorization"])
                fake.requests.append((self.path, b""))
                self.send(*fake.get)

        super().__init__(Request)
