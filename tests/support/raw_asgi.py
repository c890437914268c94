"""Calls an ASGI application with any bytes at all; a client library would refuse most of them."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Header = tuple[bytes, bytes]


@dataclass(frozen=True)
class Asked:
    """One request, as a server hands it to the application."""

    method: str = "POST"
    path: str = "/v1/classify"
    query: bytes = b""
    headers: Sequence[Header] = ()
    chunks: Sequence[bytes] = (b"",)
    hangs_up: bool = False  # after its chunks


@dataclass
class Told:
    """The answer; ``status`` 0: there was none."""

    status: int = 0
    headers: dict[bytes, bytes] | None = None
    body: bytes = b""


def ask(app: Any, asked: Asked) -> Told:
    return asyncio.run(_ask(app, asked))


async def _ask(app: Any, asked: Asked) -> Told:
    told, chunks = Told(), list(asked.chunks)

    async def receive() -> dict[str, Any]:
        if not chunks:
            return {"type": "http.disconnect"}
        body = chunks.pop(0)
        more = bool(chunks) or asked.hangs_up
        return {"type": "http.request", "body": body, "more_body": more}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            assert told.status == 0, "a second answer"
            told.status, told.headers = message["status"], dict(message["headers"])
        else:
            told.body += message.get("body", b"")

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": asked.method,
        "scheme": "http",
        "path": asked.path,
        "raw_path": asked.path.encode(),
        "query_string": asked.query,
        "root_path": "",
        "headers": [(name.lower(), value) for name, value in asked.headers],
        "client": ("127.0.0.1", 9),
        "server": ("127.0.0.1", 8000),
    }
    await app(scope, receive, send)
    return told
