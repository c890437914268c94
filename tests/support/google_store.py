"""A small Google Cloud Storage on this machine: what its client calls for files."""

import base64
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from urllib.parse import parse_qs, quote, unquote, urlsplit

import google_crc32c
import pytest

from tests.support.http_server import QuietRequest, ThreadedServer

OBJECT = re.compile(r"(?:/download)?/storage/v1/b/(?P<bucket>[^/]+)/o/(?P<name>.+)")
UPLOAD = re.compile(r"/upload/storage/v1/b/(?P<bucket>[^/]+)/o")
ENDPOINT = "STORAGE_EMULATOR_HOST"


class GoogleStore(QuietRequest):
    """One request of the JSON API; there is one bucket."""

    bucket: ClassVar[str] = ""
    objects: ClassVar[dict[str, bytes]] = {}

    def do_GET(self) -> None:
        match = OBJECT.fullmatch(urlsplit(self.path).path)
        assert match is not None, self.path
        name = unquote(match["name"])
        if match["bucket"] != self.bucket or name not in self.objects:
            self._answer(404, {"error": {"code": 404, "message": f"No such object: {name}"}})
        elif not self.path.startswith("/download"):
            self._answer(200, self._resource(name))
        else:
            self._send_range(self.objects[name])

    def do_POST(self) -> None:
        asked = json.loads(self._body())
        match = UPLOAD.fullmatch(urlsplit(self.path).path)
        if match is None or match["bucket"] != self.bucket:
            message = "The specified bucket does not exist."
            self._answer(404, {"error": {"code": 404, "message": message}})
            return
        at = f"http://{self.headers['host']}{self.path}&upload_id={quote(asked['name'])}"
        self.send(200, b"", location=at)

    def do_PUT(self) -> None:
        """Take all of an upload; the client sends less than 40 MiB at once."""
        name = parse_qs(urlsplit(self.path).query)["upload_id"][0]
        body = self._body()
        assert self.headers["content-range"].endswith(f"/{len(body)}")
        self.objects[name] = body
        self._answer(200, self._resource(name))

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("content-length", 0)))

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        self.send(status, json.dumps(content).encode(), content_type="application/json")

    def _resource(self, name: str) -> dict[str, Any]:
        content = self.objects[name]
        crc32c = base64.b64encode(google_crc32c.Checksum(content).digest()).decode()
        known = {"name": name, "bucket": self.bucket, "size": str(len(content)), "crc32c": crc32c}
        return known | {"generation": "1"}

    def _send_range(self, content: bytes) -> None:
        first, last = (int(end) for end in self.headers["range"].removeprefix("bytes=").split("-"))
        if first >= len(content):
            self._answer(416, {})
            return
        part = content[first : last + 1]
        asked = f"bytes {first}-{first + len(part) - 1}/{len(content)}"
        self.send(206, part, content_range=asked)


@contextmanager
def local_google_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Start it, give this process its address, and return the bucket's URL."""
    GoogleStore.bucket, GoogleStore.objects = f"bucket-{os.urandom(4).hex()}", {}
    with ThreadedServer(GoogleStore) as server:
        monkeypatch.setenv(ENDPOINT, server.url)
        # Its client would ask for the bucket's location in a thread, for two minutes where the
        # store is gone. Its pauses are random, which Hypothesis takes for a test's own.
        monkeypatch.setenv("DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA", "true")
        yield f"gs://{GoogleStore.bucket}"
