"""Object stores on this machine, as their clients call them for files, and a relay before one."""

import base64
import http.client
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import Message
from typing import Any, ClassVar
from urllib.parse import parse_qs, quote, unquote, urlsplit

import google_crc32c
import pytest

from tests.support.http_server import QuietRequest, ThreadedServer

S3_ENDPOINT, S3_KEYS = "AWS_ENDPOINT_URL", ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
AZURE_ENDPOINT, GOOGLE_ENDPOINT = "AZURE_STORAGE_CONNECTION_STRING", "STORAGE_EMULATOR_HOST"
BLOCK = re.compile(r"<Latest>([^<]+)</Latest>")
OBJECT = re.compile(r"(?:/download)?/storage/v1/b/(?P<bucket>[^/]+)/o/(?P<name>.+)")
UPLOAD = re.compile(r"/upload/storage/v1/b/(?P<bucket>[^/]+)/o")
OF_A_CONNECTION = ("connection", "expect", "transfer-encoding", "date", "server")


@contextmanager
def local_s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Start an S3, give this process its address and keys, and return the bucket's URL."""
    import boto3
    from moto.server import ThreadedMotoServer  # takes seconds to import

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv(S3_ENDPOINT, f"http://{host}:{port}")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    forget_session(monkeypatch)
    for name in S3_KEYS:
        monkeypatch.setenv(name, "testing")
    bucket = _new_name()  # moto's state is the process's
    boto3.client("s3").create_bucket(Bucket=bucket)
    yield f"s3://{bucket}"
    server.stop()


def forget_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have boto3 read its keys anew."""
    import boto3

    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)


def _new_name() -> str:
    return f"bucket-{os.urandom(4).hex()}"


class Store(QuietRequest):
    """One request of a store that has one bucket."""

    bucket: ClassVar[str] = ""
    objects: ClassVar[dict[str, bytes]] = {}

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("content-length", 0)))

    def asked_part(self, header: str, content: bytes) -> tuple[bytes, str]:
        """Return the part of ``content`` that a header asks for, and its Content-Range."""
        first, last = map(int, self.headers[header].removeprefix("bytes=").split("-"))
        part = content[first : last + 1]
        return part, f"bytes {first}-{first + len(part) - 1}/{len(content)}"


class AzureStore(Store):
    """One request of Azure's Blob service."""

    blocks: ClassVar[dict[tuple[str, str], bytes]] = {}  # by blob and block

    def do_HEAD(self) -> None:
        if (name := self._checked(is_read=True)) is not None:
            size = str(len(self.objects[name]))
            self.send(200, b"", content_length=size, x_ms_blob_type="BlockBlob", etag='"1"')

    def do_GET(self) -> None:
        split = urlsplit(self.path)
        if (query := parse_qs(split.query)).get("comp") == ["list"]:
            if split.path.rpartition("/")[2] == self.bucket:
                self._list(query["prefix"][0])
            else:
                self.send(404, b"", x_ms_error_code="ContainerNotFound")
        elif (name := self._checked(is_read=True)) is not None:
            part, asked = self.asked_part("x-ms-range", self.objects[name])
            self.send(206, part, content_range=asked, x_ms_blob_type="BlockBlob", etag='"1"')

    def do_DELETE(self) -> None:
        if (name := self._checked(is_read=True)) is not None:
            del self.objects[name]
            self.send(202, b"")

    def _list(self, prefix: str) -> None:
        kind = "<BlobType>BlockBlob</BlobType>"
        blobs = "".join(
            f"<Blob><Name>{name}</Name><Properties>{kind}</Properties></Blob>"
            for name in sorted(self.objects)
            if name.startswith(prefix)
        )
        text = f"<EnumerationResults><Blobs>{blobs}</Blobs><NextMarker/></EnumerationResults>"
        self.send(200, text.encode(), content_type="application/xml")

    def do_PUT(self) -> None:
        """Take a block, or the list of blocks that make a blob."""
        body = self.body()
        if (name := self._checked(is_read=False)) is None:
            return
        query = parse_qs(urlsplit(self.path).query)
        if query["comp"] == ["block"]:
            self.blocks[name, query["blockid"][0]] = body
        else:
            names = BLOCK.findall(body.decode())
            self.objects[name] = b"".join(self.blocks.pop((name, block)) for block in names)
        self.send(201, b"", etag='"1"')

    def _checked(self, *, is_read: bool) -> str | None:
        """Return the blob's name; None: refused."""
        account, container, name = unquote(urlsplit(self.path).path).lstrip("/").split("/", 2)
        if not self.headers.get("authorization", "").startswith(f"SharedKey {account}:"):
            self.send(403, b"", x_ms_error_code="AuthenticationFailed")
        elif container != self.bucket:
            self.send(404, b"", x_ms_error_code="ContainerNotFound")
        elif is_read and name not in self.objects:
            self.send(404, b"", x_ms_error_code="BlobNotFound")
        else:
            return name
        return None


@contextmanager
def local_azure_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Start it, give this process its address and key, and return the container's URL."""
    AzureStore.bucket, AzureStore.objects = _new_name(), {}
    key = base64.b64encode(b"testing").decode()
    with ThreadedServer(AzureStore) as server:
        place = f"BlobEndpoint={server.url}/shop;AccountName=shop;AccountKey={key}"
        monkeypatch.setenv(AZURE_ENDPOINT, place)
        yield f"az://{AzureStore.bucket}"


class GoogleStore(Store):
    """One request of the JSON API of Google Cloud Storage."""

    def do_DELETE(self) -> None:
        match = OBJECT.fullmatch(urlsplit(self.path).path)
        assert match is not None, self.path
        if self.objects.pop(unquote(match["name"]), None) is None:
            self._answer(404, {"error": {"code": 404, "message": "No such object"}})
        else:
            self.send(204, b"")

    def do_GET(self) -> None:
        split = urlsplit(self.path)
        if split.path.endswith("/o"):
            prefix = parse_qs(split.query)["prefix"][0]
            named = [self._resource(n) for n in sorted(self.objects) if n.startswith(prefix)]
            is_there = split.path == f"/storage/v1/b/{self.bucket}/o"
            self._answer(200 if is_there else 404, {"items": named})
            return
        match = OBJECT.fullmatch(split.path)
        assert match is not None, self.path
        name = unquote(match["name"])
        if match["bucket"] != self.bucket or name not in self.objects:
            self._answer(404, {"error": {"code": 404, "message": f"No such object: {name}"}})
        elif not self.path.startswith("/download"):
            self._answer(200, self._resource(name))
        else:
            part, asked = self.asked_part("range", self.objects[name])
            if part:
                self.send(206, part, content_range=asked)
            else:
                self._answer(416, {})

    def do_POST(self) -> None:
        asked = json.loads(self.body())
        match = UPLOAD.fullmatch(urlsplit(self.path).path)
        if match is None or match["bucket"] != self.bucket:
            message = "The specified bucket does not exist."
            self._answer(404, {"error": {"code": 404, "message": message}})
            return
        at = f"http://{self.headers['host']}{self.path}&upload_id={quote(asked['name'])}"
        self.send(200, b"", location=at)

    def do_PUT(self) -> None:
        """Take all of an upload; the client sends less than 40 MiB at once."""
        name, body = parse_qs(urlsplit(self.path).query)["upload_id"][0], self.body()
        assert self.headers["content-range"].endswith(f"/{len(body)}")
        self.objects[name] = body
        self._answer(200, self._resource(name))

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        self.send(status, json.dumps(content).encode(), content_type="application/json")

    def _resource(self, name: str) -> dict[str, Any]:
        content = self.objects[name]
        crc32c = base64.b64encode(google_crc32c.Checksum(content).digest()).decode()
        known = {"name": name, "bucket": self.bucket, "size": str(len(content)), "crc32c": crc32c}
        return known | {"generation": "1"}


@contextmanager
def local_google_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Start it, give this process its address, and return the bucket's URL."""
    GoogleStore.bucket, GoogleStore.objects = _new_name(), {}
    with ThreadedServer(GoogleStore) as server:
        monkeypatch.setenv(GOOGLE_ENDPOINT, server.url)
        # Its client would ask for the bucket's location in a thread, for two minutes where the
        # store is gone. Its pauses are random, which Hypothesis takes for a test's own.
        monkeypatch.setenv("DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA", "true")
        yield f"gs://{GoogleStore.bucket}"


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
