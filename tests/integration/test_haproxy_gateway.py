"""HAProxy, with all of Serve's configuration, before the HTTP interface in a real uvicorn."""

import asyncio
import gzip
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from app.http.api import create_api
from app.launch.haproxy import HaproxyCommand
from tests.support.fakes import FakeService
from tests.support.haproxy_configs import write_serves_config
from tests.support.haproxy_process import MAX_REQUESTS, OPTIONS, running
from tests.support.services.processes import EVENTUALLY_S, wait_until

NUM_SLOW = MAX_REQUESTS + 8
ROUTES = ("/nothing", "/healthz", "/v1/models", "/v2/models/nothing/infer", "/v1/classify?top_k=x")
UPGRADE = (
    b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


@pytest.fixture(scope="module")
def gateway() -> Iterator[int]:
    """Return the port of a Gateway's HTTP interface."""
    api = create_api(FakeService())

    async def as_serve_has_it(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == "/-/healthz":  # HAProxy's own check
            scope["path"] = "/healthz"
        if scope["type"] == "http":
            await api(scope, receive, send)

    config = uvicorn.Config(as_serve_has_it, port=0, lifespan="off", log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_until(lambda: server.started, EVENTUALLY_S, "uvicorn starts")
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def port(
    gateway: int, free_port: Callable[[], int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[int]:
    """Return HAProxy's port; it was started as Serve starts it, and finds the Gateway."""
    folder = tmp_path_factory.mktemp("run")
    own, front = (free_port(), free_port()), free_port()
    config = write_serves_config(
        Path(folder) / "haproxy.cfg", ports=own, http_port=front, replicas={"http": gateway}
    )
    command = HaproxyCommand(Path(folder) / "haproxy", own)
    command.write(OPTIONS)

    def answers() -> bool:
        with suppress(httpx.HTTPError):
            return httpx.get(f"http://127.0.0.1:{front}/healthz", trust_env=False).is_success
        return False

    with running(command, config):
        wait_until(answers, EVENTUALLY_S, "HAProxy finds the Gateway")
        yield front


@pytest.fixture
def client(port: int) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False) as client:
        yield client


def test_slow_bodies_that_nobody_reads_harm_nobody(port: int) -> None:
    """Their connections end once they send more; till then they are no requests under way."""
    good, ends = asyncio.run(_beside_unread_bodies(port))
    assert good == {200}
    assert ends == {404, 405, 422}


async def _beside_unread_bodies(port: int) -> tuple[set[int], set[int]]:
    paths = itertools.islice(itertools.cycle(ROUTES), NUM_SLOW)
    begun = [await _begun(port, path.encode()) for path in paths]
    heads = [await reader.readuntil(b"\r\n\r\n") for reader, _ in begun]
    assert [head for head in heads if b"\r\nconnection: close\r\n" not in head] == []
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
        good = {
            (await client.post("/v1/classify", content=b"image")).status_code for _ in range(30)
        }
    async with asyncio.timeout(EVENTUALLY_S):
        for reader, writer in begun:
            await _until_it_ends(reader, writer)
    return good, {int(head.split(b" ", 2)[1]) for head in heads}


async def _begun(port: int, path: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST %s HTTP/1.1\r\nHost: x\r\n%s" % (path, UPGRADE))
    writer.write(b"Content-Length: 1000000\r\n\r\n" + bytes(20_000))
    return reader, writer


async def _until_it_ends(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while not reader.at_eof():
            writer.write(b"a")
            with suppress(TimeoutError):
                await asyncio.wait_for(reader.read(65536), 0.05)
    writer.close()


@pytest.mark.parametrize("body", [b"", b"image"])
@pytest.mark.parametrize("path", ["/nothing", "/v1/models"])
def test_a_small_body_that_nobody_reads_keeps_its_connection(
    client: httpx.Client, path: str, body: bytes
) -> None:
    ports = set()
    for _ in range(3):
        answer = client.post(path, content=body)
        assert answer.status_code in (404, 405)
        ports.add(answer.extensions["network_stream"].get_extra_info("client_addr")[1])
    assert len(ports) == 1


@pytest.mark.parametrize("path", ["/", "/docs", "/healthz", "/v1/models", "/page/page.js"])
def test_head_is_get_without_its_content(client: httpx.Client, path: str) -> None:
    told, asked = client.head(path), client.get(path)
    assert (told.status_code, told.content) == (200, b"")
    assert told.headers["content-length"] == asked.headers["content-length"]


def test_a_coded_photo(client: httpx.Client) -> None:
    headers = {"content-encoding": "gzip"}
    answer = client.post("/v1/classify", content=gzip.compress(b"image"), headers=headers)
    assert answer.is_success


@pytest.mark.parametrize("path", ["/v1/classify/", "/healthz/", "/docs/", "/page", "/v1/models/"])
def test_a_slash_at_the_end_redirects_nobody(client: httpx.Client, path: str) -> None:
    for answer in (client.get(path), client.post(path, content=b"photo")):
        assert answer.status_code == 404
        assert "location" not in answer.headers
        assert "http:" not in answer.text
        assert ".sock" not in answer.text


def test_a_body_that_is_announced_too_large_is_not_asked_for(port: int) -> None:
    async def told() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/classify HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n")
        writer.write(b"Content-Length: 99999999\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        writer.close()
        return head

    head = asyncio.run(asyncio.wait_for(told(), EVENTUALLY_S))
    assert head.startswith(b"HTTP/1.1 413 ")
    assert b"\r\nconnection: close\r\n" in head


@pytest.mark.parametrize("verb", ["BREW", "PURGE"])
def test_a_method_that_is_none(client: httpx.Client, verb: str) -> None:
    answer = client.request(verb, "/v1/classify", content=b"photo")
    assert answer.status_code == 405
    assert "in capital letters" in answer.json()["error"]["message"]
