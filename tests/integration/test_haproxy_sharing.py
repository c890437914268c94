"""The real HAProxy before a server of ours and another application's: who may disturb whom."""

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

import pytest

from app import errors
from app.errors import ADDRESS_HEADER, CLOSE_HEADER, GATEWAYS_HEADER, INTERNAL_HEADERS
from tests.support.cases import cases
from tests.support.haproxy_process import HTTP, MAX_REQUESTS, OPTIONS, haproxy_before
from tests.support.services.processes import EVENTUALLY_S, wait_until
from tests.support.slow_clients import linger

APP = Path(errors.__file__).parent
CLASSIFY = "/v1/classify"
OF_SERVE = ("x-session-id: 7", "serve_multiplexed_model_id: m", "x-request-timeout-seconds: 9")
KEY = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="
BEGUN = bytes(15 * 2**10)  # of a body: so much lets a request go on
NUM_SLOW = MAX_REQUESTS + 8
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Server:
    """Answers as ``answer`` says, once the head is there; remembers heads by path."""

    def __init__(self) -> None:
        self.port = 0
        self.heads: dict[str, str] = {}
        self.num_arrived = 0
        self.open_for: set[asyncio.StreamWriter] = set()
        self.reading: set[asyncio.StreamWriter] = set()  # a request's body; not idle
        self.answer: Callable[[str], bytes | None] = lambda _: ok(b"{}")

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open_for.add(writer)
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode("latin-1"):
                self.heads[head.split(" ", 2)[1]] = head.lower()
                self.num_arrived += 1
                answer = self.answer(head)
                length = re.search(r"content-length: (\d+)", head, re.IGNORECASE)
                if length and (answer is None or b"connection: close" not in answer):
                    self.reading.add(writer)
                    await reader.readexactly(int(length[1]))
                    self.reading.discard(writer)
                if answer is None:  # it dies
                    break
                writer.write(answer)
                await writer.drain()
                if b"connection: close" in answer:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open_for.discard(writer)
            self.reading.discard(writer)
            writer.close()


def ok(body: bytes, *more: str, status: str = "200 OK") -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *more]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class Clients:
    """Connections to HAProxy."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.writers: list[asyncio.StreamWriter] = []

    async def open(self) -> Streams:
        streams = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.append(streams[1])
        return streams

    def close(self) -> None:
        """Hang up, all of them."""
        for writer in self.writers:
            writer.close()

    async def ask(self, path, *more, streams=None, verb="POST", body=b"photo"):
        """Return status, head and body of an answer; status 0: not a byte came."""
        reader, writer = streams or await self.open()
        lines = [f"{verb} {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *more]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return 0, b"", b""
        length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        content = await reader.readexactly(int(length[1])) if length else b""
        return int(head.split()[1]), head.lower(), content

    async def slow(self, path: str, *more: str, sent: bytes = BEGUN) -> Streams:
        """Begin a request whose body does not come to its end."""
        reader, writer = await self.open()
        lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Length: 1000000", *more]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + sent)
        await writer.drain()
        return reader, writer


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    """Both applications' server."""
    server = Server()
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listener:
        server.port = listener.sockets[0].getsockname()[1]
        yield server
        for writer in [*server.open_for]:
            writer.close()
        await until(lambda: not server.open_for)


@pytest.fixture
async def clients(server, free_port, tmp_path) -> AsyncIterator[Clients]:
    """Clients of the HAProxy before it."""
    clients = Clients(free_port())
    with haproxy_before(clients.port, server.port, tmp_path):
        await _until_it_answers(clients)
        yield clients
        clients.close()


async def _until_it_answers(clients: Clients) -> None:
    while True:
        try:
            if (await clients.ask("/begun"))[0] == 200:
                return
        except OSError:
            await asyncio.sleep(0.02)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def answers_all(clients: Clients) -> bool:
    """Whether requests to classify are answered: as many as one in 100 ms would not be."""
    return {(await clients.ask(CLASSIFY))[0] for _ in range(20)} == {200}


@cases("path", "/other/thing", "/page/nothing", "/v1/models", "/v2/models/a/ready")
async def test_bodies_of_other_routes_are_no_requests_under_way(server, clients, path):
    before = server.num_arrived
    for _ in range(NUM_SLOW):
        await clients.slow(path)
    await until(lambda: server.num_arrived == before + NUM_SLOW)
    assert await answers_all(clients)


async def test_requests_that_do_not_begin_are_not_under_way(clients):
    for _ in range(NUM_SLOW):
        await clients.slow(CLASSIFY, sent=b"a")
    assert await answers_all(clients)


async def test_who_was_answered_is_not_under_way_and_its_connection_ends(server, clients):
    """Whatever goes on to come; the Gateway closes its own connection (app/http/body.py)."""
    ended = []
    early = ok(b"{}", "connection: close", f"{CLOSE_HEADER}: 1", status="404 Not Found")
    server.answer = lambda head: early if "1000000" in head else ok(b"{}")
    for _ in range(NUM_SLOW):
        reader, writer = await clients.slow(CLASSIFY)
        told = await reader.readuntil(b"{}")
        assert told.startswith(b"HTTP/1.1 404 ")
        assert b"connection: close" in told.lower()
        assert CLOSE_HEADER.encode() not in told.lower()
        ended.append((reader, writer))
    assert await answers_all(clients)
    await asyncio.gather(*(_until_it_ends(*streams) for streams in ended))


async def _until_it_ends(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send a byte now and then: whoever sends more is not let."""
    with suppress(ConnectionError):
        while not reader.at_eof():
            writer.write(b"a")
            with suppress(TimeoutError):
                await asyncio.wait_for(reader.read(1), 0.05)


async def test_requests_to_classify_are_under_way_until_they_are_answered(server, clients):
    before = server.num_arrived
    for _ in range(MAX_REQUESTS):
        await clients.slow(CLASSIFY)
    await until(lambda: server.num_arrived == before + MAX_REQUESTS)
    assert 429 in [(await clients.ask(CLASSIFY))[0] for _ in range(9)]
    # Another application's are none of ours, and have no limit of ours.
    assert {(await clients.ask("/other/infer"))[0] for _ in range(9)} == {200}
    assert len(server.reading) >= MAX_REQUESTS
    clients.close()
    await until(lambda: not server.reading)
    assert await answers_all(clients)


async def test_a_connection_is_never_upgraded(server, clients):
    upgrade = ("Connection: Upgrade", "Upgrade: websocket", KEY)
    for path in (CLASSIFY, "/other/chat"):
        assert (await clients.ask(path, *upgrade))[0] == 200
    assert "upgrade:" not in server.heads[CLASSIFY]
    assert "upgrade: websocket" in server.heads["/other/chat"]  # as Serve has it


@pytest.mark.parametrize("header", [*OF_SERVE, *(f"{name}: 999" for name in INTERNAL_HEADERS)])
async def test_a_clients_own_header_goes_to_another_application_alone(server, clients, header):
    for path in (CLASSIFY, "/other/infer"):
        await clients.ask(path, header)
    assert header not in server.heads[CLASSIFY]
    if (name := header.partition(":")[0]) != ADDRESS_HEADER:  # which is HAProxy's own
        assert f"{name}:" not in server.heads[CLASSIFY]
    assert header in server.heads["/other/infer"]


async def test_each_of_several_gateways_is_told_how_many_answer(server, free_port, tmp_path):
    clients = Clients(free_port())
    sections = HTTP + "    server two 127.0.0.1:{back}\n    server away 127.0.0.1:{back} disabled\n"
    with haproxy_before(clients.port, server.port, tmp_path, sections=sections):
        await _until_it_answers(clients)
        await clients.ask(CLASSIFY, f"{GATEWAYS_HEADER}: 999")
        clients.close()
    assert f"{GATEWAYS_HEADER}: 2\r\n" in server.heads[CLASSIFY]


def test_every_internal_header_is_in_the_list():
    texts = [path.read_text("utf-8") for path in APP.rglob("*.py")]
    named = {name for text in texts for name in re.findall(r'"(x-(?:tandem|grpc)-[a-z-]+)"', text)}
    assert named == set(INTERNAL_HEADERS)


@pytest.mark.parametrize("name", ["traceparent", "tracestate", "x-request-id"])
async def test_a_header_that_serve_could_not_decode_goes_no_further(server, clients, name):
    await clients.ask(CLASSIFY, f"{name}: \u00e9")
    assert name not in server.heads[CLASSIFY]
    await clients.ask(CLASSIFY, f"{name}: text")
    assert f"{name}: text" in server.heads[CLASSIFY]


async def test_serve_watches_for_no_disconnect_where_the_gateway_does(server, clients):
    sent = ("x-request-disconnect-disabled: 1", "x-request-disconnect: 1")
    for path in (CLASSIFY, "/v1/models"):
        await clients.ask(path, *sent)
    assert "x-request-disconnect-disabled: ?1" in server.heads[CLASSIFY]
    assert "x-request-disconnect" not in server.heads["/v1/models"]


@pytest.mark.parametrize("kind", ["headers", "body"])
def test_a_client_that_does_not_begin_in_time_never_reaches_the_gateway(free_port, tmp_path, kind):
    front = free_port()
    with haproxy_before(front, free_port(), tmp_path, OPTIONS._replace(begin_within_s=1)):
        wait_until(lambda: _listens(front), EVENTUALLY_S, "HAProxy listens")
        cut = asyncio.run(linger("127.0.0.1", front, kind, EVENTUALLY_S, every_s=0.2))
    assert cut.status == 408


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("size", [5, 50_000, 200_000])
async def test_a_server_that_dies_is_told_of_in_json(server, clients, size):
    """With a connection that has served before, too: the client learns that it broke off."""
    warm = [await clients.ask(CLASSIFY, streams=await clients.open()) for _ in range(3)]
    assert {status for status, _, _ in warm} == {200}
    server.answer = lambda _: None
    status, _, body = await clients.ask(CLASSIFY, body=bytes(size))
    assert status == 502
    assert b'"broken_off"' in body


async def test_a_request_on_a_kept_connection_is_asked_again(server, clients):
    kept, served = await clients.open(), []
    assert (await clients.ask(CLASSIFY, streams=kept))[0] == 200

    def dies_once(head: str) -> bytes | None:
        served.append(head)
        return None if len(served) == 1 else ok(b"{}")

    server.answer = dies_once
    status, _, _ = await clients.ask(CLASSIFY, streams=kept, body=bytes(30_000))
    assert (status, len(served)) == (200, 2)


@pytest.mark.parametrize("verb", ["post", "Post", "BREW"])
async def test_a_method_that_no_parser_knows_is_refused_in_json(clients, verb):
    status, _, body = await clients.ask(CLASSIFY, verb=verb)
    assert status == 405
    assert b"GET HEAD POST PUT PATCH DELETE OPTIONS" in body
    assert (await clients.ask("/other/thing", verb=verb))[0] == 200


@cases("ends", True, pytest.param(False, marks=pytest.mark.slow, id="at HAProxy's time limit"))
async def test_who_waits_for_a_word_before_a_large_body_is_sent_on(server, clients, ends):
    """The Gateway says whether it is too large; HAProxy would have it sent."""
    large = ok(b"{}", "connection: close", f"{CLOSE_HEADER}: 1", status="413 Too Large")
    server.answer = lambda _: large
    reader, writer = await clients.open()
    head = f"POST {CLASSIFY} HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n"
    writer.write(head.encode() + b"Content-Length: 99999999\r\n\r\n")
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 413 ")
    if ends:
        writer.write_eof()
    await reader.read()
    server.answer = lambda _: ok(b"{}")
    reader, writer = await clients.open()
    writer.write(head.encode() + b"Content-Length: 9\r\n\r\n")
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")


async def test_it_speaks_http_1_alone(clients):
    reader, writer = await clients.open()
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
    told = await reader.read()
    assert not told or told.startswith(b"HTTP/1.1 400 ")
