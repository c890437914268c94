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
        return {"type": "http.request", "body": body, "more_body": bool(chunks) or asked.hangs_up}

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


FORM = (
    b'--b\r\nContent-Disposition: form-data; name="f"; filename="1"\r\n\r\nimage one\r\n'
    b'--b\r\nContent-Disposition: form-data; name="f"; filename="2"\r\n\r\ntext\r\n--b--\r\n'
)
REQUESTS = {
    "image": Asked(chunks=(b"image", b" in two")),
    "top_k": Asked(query=b"top_k=3", chunks=(b"image",)),
    "top_k too large": Asked(query=b"top_k=9999", chunks=(b"image",)),
    "no image": Asked(chunks=(b"text",)),
    "form": Asked(headers=[(b"content-type", b"multipart/form-data; boundary=b")], chunks=(FORM,)),
    "broken form": Asked(headers=[(b"content-type", b"multipart/form-data")], chunks=(FORM,)),
    "too long": Asked(chunks=(bytes(5000),)),
    "hangs up": Asked(chunks=(b"ima",), hangs_up=True),
    "bad timeout": Asked(headers=[(b"x-request-timeout-seconds", b"x")], chunks=(b"image",)),
    "bad priority": Asked(headers=[(b"priority", b"u=9")], chunks=(b"image",)),
}
STATUSES = {
    "image": 200,
    "top_k": 200,
    "top_k too large": 422,
    "no image": 400,
    "form": 200,
    "broken form": 422,
    "too long": 413,
    "hangs up": 499,
    "bad timeout": 422,
    "bad priority": 422,
}
