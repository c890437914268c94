"""A small Azure Blob Storage on this machine: the calls that smart_open makes for files."""

import base64
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from tests.support.http_server import QuietRequest, ThreadedServer

ACCOUNT = "shop"
ENDPOINT = "AZURE_STORAGE_CONNECTION_STRING"
BLOCK = re.compile(r"<Latest>([^<]+)</Latest>")


class AzureStore(QuietRequest):
    """One request of the Blob service; there is one container."""

    container: ClassVar[str] = ""
    blobs: ClassVar[dict[str, bytes]] = {}
    blocks: ClassVar[dict[tuple[str, str], bytes]] = {}  # by blob and block

    def do_HEAD(self) -> None:
        if (name := self._checked(is_read=True)) is not None:
            size = str(len(self.blobs[name]))
            self.send(200, b"", content_length=size, x_ms_blob_type="BlockBlob", etag='"1"')

    def do_GET(self) -> None:
        if (name := self._checked(is_read=True)) is not None:
            asked = self.headers["x-ms-range"].removeprefix("bytes=")
            first, last = (int(end) for end in asked.split("-"))
            content = self.blobs[name]
            part = content[first : last + 1]
            said = f"bytes {first}-{first + len(part) - 1}/{len(content)}"
            self.send(206, part, content_range=said, x_ms_blob_type="BlockBlob", etag='"1"')

    def do_PUT(self) -> None:
        """Take a block, or the list of blocks that make a blob."""
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if (name := self._checked(is_read=False)) is None:
            return
        query = parse_qs(urlsplit(self.path).query)
        if query["comp"] == ["block"]:
            self.blocks[name, query["blockid"][0]] = body
        else:
            names = BLOCK.findall(body.decode())
            self.blobs[name] = b"".join(self.blocks.pop((name, block)) for block in names)
        self.send(201, b"", etag='"1"')

    def _checked(self, *, is_read: bool) -> str | None:
        """Return the blob's name; None: refused."""
        account, container, name = unquote(urlsplit(self.path).path).lstrip("/").split("/", 2)
        refused = None
        if not self.headers.get("authorization", "").startswith(f"SharedKey {account}:"):
            refused = 403, "AuthenticationFailed"
        elif container != self.container:
            refused = 404, "ContainerNotFound"
        elif is_read and name not in self.blobs:
            refused = 404, "BlobNotFound"
        if refused:
            self.send(refused[0], b"", x_ms_error_code=refused[1])
            return None
        return name


@contextmanager
def local_azure_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Start it, give this process its address and key, and return the container's URL."""
    AzureStore.container, AzureStore.blobs = f"container-{os.urandom(4).hex()}", {}
    key = base64.b64encode(b"testing").decode()
    with ThreadedServer(AzureStore) as server:
        place = f"BlobEndpoint={server.url}/{ACCOUNT};AccountName={ACCOUNT};AccountKey={key}"
        monkeypatch.setenv(ENDPOINT, place)
        yield f"az://{AzureStore.container}"
