"""HAProxy, with all of Serve's configuration, before the HTTP interface in a real uvicorn."""

import asyncio
import gzip
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from app.launch.checks import HttpOptions
from app.launch.haproxy_rules import RuleOptions
from app.settings import Settings
from tests.support.fakes import FakeService
from tests.support.gateway_behind_haproxy import gateway_of, haproxy_of
from tests.support.haproxy_process import MAX_REQUESTS, OPTIONS
from tests.support.services.processes import EVENTUALLY_S, wait_until
from tests.support.slow_clients import KINDS, Cut, linger

HASTY_S = 1
NUM_SLOW_OF_A_KIND, NUM_GOOD = 2, 30
NUM_SLOW = MAX_REQUESTS + 8
ROUTES = ("/nothing", "/healthz", "/v1/models", "/v2/models/nothing/infer", "/v1/classify?top_k=x")
UPGRADE = (
    b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


@contextmanager
def running(
    service: FakeService,
    free_port: Callable[[], int],
    folder: Path,
    options: RuleOptions = OPTIONS,
) -> Iterator[int]:
    """Yield HAProxy's port; it was started as Serve starts it, and finds the Gateway."""
    front, own = free_port(), (free_port(), free_port())
    http = HttpOptions(host="127.0.0.1", port=front)

    def answers() -> bool:
        with suppress(httpx.HTTPError):
            return httpx.get(f"http://127.0.0.1:{front}/healthz", trust_env=False).is_success
        return False

    with gateway_of(service) as gateway, haproxy_of(http, gateway, folder, own, options):
        wait_until(answers, EVENTUALLY_S, "HAProxy finds the Gateway")
        yield front


@pytest.fixture(scope="module")
def port(free_port: Callable[[], int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with running(FakeService(), free_port, tmp_path_factory.mktemp("run")) as port:
        yield port


@pytest.fixture
def hasty_port(free_port: Callable[[], int], tmp_path: Path) -> Iterator[int]:
    """HAProxy's port; a request begins within a second, and its body is there after another."""
    options = OPTIONS._replace(begin_within_s=HASTY_S)
    settings = Settings(max_body_bytes=2_000_000, request_timeout_s=HASTY_S)
    with running(FakeService(settings), free_port, tmp_path, options) as port:
        yield port


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


def test_slow_and_idle_clients_are_cut_and_good_ones_served_meanwhile(hasty_port: int) -> None:
    cuts, good = asyncio.run(_beside_slow_clients(hasty_port))
    assert good == {200}
    assert {(cut.kind, cut.status) for cut in cuts} == {(kind, 408) for kind in KINDS}
    assert len(cuts) == NUM_SLOW_OF_A_KIND * len(KINDS)


async def _beside_slow_clients(port: int) -> tuple[list[Cut], set[int]]:
    slow = [
        asyncio.create_task(linger("127.0.0.1", port, kind, EVENTUALLY_S, every_s=0.1))
        for kind in [*KINDS] * NUM_SLOW_OF_A_KIND
    ]
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
        good = {
            (await client.post("/v1/classify", content=b"image")).status_code
            for _ in range(NUM_GOOD)
        }
    return await asyncio.gather(*slow), good


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
