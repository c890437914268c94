"""A real HTTP server on a thread, with answers that the test chooses."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, bytes]


def classified(label: str = "tench", probability: float = 0.9) -> dict[str, Any]:
    """Return what the service answers for one image, as far as the command line reads it."""
    row = {"index": 0, "label": label, "probability": probability}
    return {"predictions": [row], "members": {"a": {"label": label, "probability": probability}}}


class FakeServer:
    """Answers POST with ``answer(body)`` and GET with ``get``; remembers the requests."""

    def __init__(self) -> None:
        self.answer: Callable[[bytes], Answer] = lambda _: (200, json.dumps(classified()).encode())
        self.get: Answer = (200, b"{}")
        self.requests: list[tuple[str, bytes]] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                fake.requests.append((self.path, body))
                self.send(fake.answer(body))

            def do_GET(self) -> None:
                fake.requests.append((self.path, b""))
                self.send(fake.get)

            def send(self, answer: Answer) -> None:
                self.send_response(answer[0])
                self.send_header("content-length", str(len(answer[1])))
                self.end_headers()
                self.wfile.write(answer[1])

            def log_message(self, *_: object) -> None:
                """Keep the test's output clean."""

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,))

    def __enter__(self) -> "FakeServer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()
