"""Slow clients, idle connections, headers that are too much: cut, and nobody else is harmed.

In the fast tier slow and idle clients are cut after a second in
tests/integration/test_haproxy_gateway.py.
"""

import asyncio
import itertools
import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import pytest

from app.graph.request import TIMEOUT_HEADER
from tests.support.cases import cases
from tests.support.slow_clients import KINDS, Cut, linger

NUM_IDLE = 1000
NUM_SLOW = 20  # of each kind
# app/launch/haproxy_cfg gives headers and a body's beginning 10 s, the Gateway a body 10 s.
CUT_WITHIN_S = 10 + 10 + 5
NUM_GOOD = 30
SLOW_ROUTES = (
    "/nothing /healthz /v1/models /v2/models/nothing/infer /docs/assets/x /v1/classify?top_k=x"
)
NUM_SLOW_EVERYWHERE = 140  # the requests that may be under way are 128
UPGRADE = (
    b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)
NAMES = (
    "x-request-id x-request-timeout-seconds x-session-id X_Session_Id serve_multiplexed_model_id "
    "Serve-Multiplexed-Model-Id x-request-disconnect-disabled traceparent tracestate priority "
    "content-type authorization"
)


@pytest.mark.slow
def test_slow_and_idle_clients_are_cut_and_good_ones_served_meanwhile(service, photo, photo_label):
    cuts, good = asyncio.run(_together(service.port, photo))
    assert good == {(200, photo_label): NUM_GOOD}
    told = Counter((cut.kind, cut.status) for cut in cuts)
    assert sum(told.values()) == NUM_IDLE + NUM_SLOW * (len(KINDS) - 1)
    assert {status for _, status in told} == {408}, told
    assert max(cut.after_s for cut in cuts) < CUT_WITHIN_S


async def _together(port: int, photo: bytes) -> tuple[list[Cut], Counter[tuple[int, str]]]:
    kinds = ["idle"] * NUM_IDLE + [k for k in KINDS if k != "idle"] * NUM_SLOW
    slow = [asyncio.create_task(linger("127.0.0.1", port, k, 60)) for k in kinds]
    await asyncio.sleep(1)  # all of them have their connections
    good = await _good_ones(port, photo)
    return await asyncio.gather(*slow), good


async def _good_ones(port: int, photo: bytes) -> Counter[tuple[int, str]]:
    """Send photos, one after another; return how many got which status and label."""
    good: Counter[tuple[int, str]] = Counter()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        for _ in range(NUM_GOOD):
            answer = await client.post("/v1/classify", content=photo)
            label = answer.json()["predictions"][0]["label"] if answer.is_success else ""
            good[answer.status_code, label] += 1
    return good


def test_slow_bodies_that_nobody_reads_harm_nobody(service, photo, photo_label):
    """Their connections end once they send more; till then they are no requests under way."""
    good, ends = asyncio.run(_beside_unread_bodies(service.port, photo))
    assert good == {(200, photo_label): NUM_GOOD}
    assert ends == {404, 405, 422}


async def _beside_unread_bodies(port, photo):
    paths = itertools.islice(itertools.cycle(SLOW_ROUTES.split()), NUM_SLOW_EVERYWHERE)
    started = [await _begun(port, path.encode()) for path in paths]
    good = await _good_ones(port, photo)
    return good, set(await asyncio.gather(*(_until_it_ends(*one) for one in started)))


async def _begun(port: int, path: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Begin a request whose body does not end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST %s HTTP/1.1\r\nHost: x\r\n%s" % (path, UPGRADE))
    writer.write(b"Content-Length: 1000000\r\n\r\n" + bytes(20_000))
    return reader, writer


async def _until_it_ends(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
    """Send a byte now and then until the connection is closed; return the answer's status."""
    head = await reader.readuntil(b"\r\n\r\n")
    assert b"\r\nconnection: close\r\n" in head
    async with asyncio.timeout(CUT_WITHIN_S):
        with suppress(ConnectionError):
            while not reader.at_eof():
                writer.write(b"a")
                with suppress(TimeoutError):
                    await asyncio.wait_for(reader.read(65536), 0.1)
    writer.close()
    return int(head.split(b" ", 2)[1])


def _answer_to(service, request):
    with socket.create_connection(("127.0.0.1", service.port), 60) as connection:
        with suppress(OSError):  # it may have answered and closed before all was sent
            connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_who_is_answered_before_the_body_is_there_is_not_left_waiting(service, photo):
    """HAProxy closes such a connection; one that it spliced the body of once hung for ever."""
    body = photo + bytes(100_000)
    in_no_time = {TIMEOUT_HEADER: "0.0005"}  # for some of them less than their bodies take
    with httpx.Client(base_url=service.url, timeout=10, trust_env=False) as client:

        def ask(_: int) -> httpx.Response:
            return client.post("/v1/classify", content=body, headers=in_no_time)

        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(ask, range(800)))
        assert client.post("/v1/classify", content=body).is_success
    assert {answer.status_code for answer in answers} <= {408, 504}
    for answer in answers:
        if answer.status_code == 408:  # a 504 may have come before all of its body, too
            assert answer.headers["connection"] == "close"


@cases(
    "status, path, lines",
    (200, b"/healthz?" + b"a" * 14_000, b""),
    (200, b"/healthz", b"X-Long: " + b"a" * 14_000 + b"\r\n"),
    (400, b"/healthz", b"X-Long: " + b"a" * 16_000 + b"\r\n"),
    (400, b"/healthz", b"X-Long: " + b"a" * 100_000 + b"\r\n"),  # more than HAProxy's buffer
    (400, b"/healthz", b"".join(b"X-%d: a\r\n" % i for i in range(200))),
    (400, b"/healthz?" + b"a" * 16_000, b""),
    ids=["address", "header", "16 KB", "100 KB", "200 lines", "an address of 16 KB"],
)
def test_headers_have_a_limit(service, status, path, lines):
    head = b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    answer = _answer_to(service, b"GET " + path + head + lines + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 %d " % status)


@pytest.mark.parametrize("name", NAMES.split())
@pytest.mark.parametrize("value", [b"\xff\xfe", b"\x80 text"])
def test_a_header_that_is_no_text_breaks_nothing(service, photo, name, value):
    head = b"POST /v1/classify HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    size = b"Content-Length: %d\r\n\r\n" % len(photo)
    answer = _answer_to(service, head + name.encode() + b": " + value + b"\r\n" + size + photo)
    assert int(answer.split(b" ", 2)[1]) in (200, 400, 422), answer[:300]
