"""A relay before a store: notes requests, breaks answers off, refuses in the store's place."""

import http.client
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import Message
from typing import ClassVar
from urllib.parse import unquote

from tests.support.http_server import QuietRequest, ThreadedServer

OF_A_CONNECTION = ("connection", "expect", "transfer-encoding", "date", "server")


class StoreRelay(QuietRequest):
    """Passes a request on, and its answer back; the class has what the tests read and set."""

    protocol_version = "HTTP/1.1"  # boto3 waits for a 100 before it sends a body
    store: ClassVar[str] = ""  # its HOST:PORT
    asked: ClassVar[list[tuple[str, str]]] = []  # method and path
    num_broken: ClassVar[int] = 0  # answers with a .bin file that break off
    status: ClassVar[int] = 0

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.close_connection = True
        self.asked.append((self.command, unquote(self.path)))
        if self.status:
            self.send(self.status, b"")
            return
        asking = http.client.HTTPConnection(self.store)
        asking.request(self.command, self.path, body, self._passed(self.headers))
        answer = asking.getresponse()
        content, headers = answer.read(), self._passed(answer.headers)
        headers["content_length"] = headers.pop("content-length", str(len(content)))
        asking.close()
        if StoreRelay.num_broken and self.command == "GET" and ".bin" in self.path and content:
            StoreRelay.num_broken -= 1
            content = content[: len(content) // 2]
        self.send(answer.status, content, **headers)

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def _passed(self, headers: Message) -> dict[str, str]:
        lower = {name.lower(): value for name, value in headers.items()}
        return {name: value for name, value in lower.items() if name not in OF_A_CONNECTION}


@contextmanager
def store_relay(store: str) -> Iterator[str]:
    """Start a relay before ``store``, an ``http://HOST:PORT``; return its own."""
    StoreRelay.store = store.removeprefix("http://")
    StoreRelay.asked, StoreRelay.num_broken, StoreRelay.status = [], 0, 0
    with ThreadedServer(StoreRelay) as server:
        yield server.url
