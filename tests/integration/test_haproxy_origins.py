"""The real HAProxy's own answers, as pages of other origins see them."""

import asyncio
from collections.abc import Callable, Iterator

import httpx
import pytest

from app.setting_values import EXPOSED
from tests.support.haproxy_process import MAX_REQUESTS, ORIGIN, haproxy_before
from tests.support.services.processes import EVENTUALLY_S, wait_until

ALLOWED = "access-control-allow-origin"
OTHER = "https://other.example"


@pytest.fixture(scope="module")
def ports(
    free_port: Callable[[], int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[int, int]]:
    front, back = free_port(), free_port()
    with haproxy_before(front, back, tmp_path_factory.mktemp("haproxy")):
        yield front, back


@pytest.fixture
def client(ports: tuple[int, int]) -> Iterator[httpx.Client]:
    url = f"http://127.0.0.1:{ports[0]}"
    with httpx.Client(base_url=url, trust_env=False, timeout=30) as client:

        def is_up() -> bool:
            try:
                return client.get("/healthz").status_code == 503
            except httpx.ConnectError:
                return False

        wait_until(is_up, EVENTUALLY_S, "HAProxy answers")
        yield client


@pytest.mark.parametrize(
    ("status", "method", "path", "headers"),
    [
        (503, "POST", "/v1/classify", {}),  # there is no Gateway
        (405, "BREW", "/v1/classify", {}),
        (400, "GET", "/v1/models", {"x-long": "x" * 15_500}),
    ],
)
def test_a_page_that_may_call_reads_haproxys_errors(
    client: httpx.Client, status: int, method: str, path: str, headers: dict[str, str]
) -> None:
    answer = client.request(method, path, headers=headers | {"origin": ORIGIN})
    assert (answer.status_code, answer.headers.get(ALLOWED)) == (status, ORIGIN)
    assert answer.headers["vary"] == "Origin"
    assert answer.headers["access-control-expose-headers"] == ", ".join(EXPOSED)
    for origin in ({"origin": OTHER}, {"origin": f"{ORIGIN}.evil"}, {}):
        refused = client.request(method, path, headers=headers | origin)
        assert refused.status_code == status
        assert ALLOWED not in refused.headers


def test_another_applications_answers_are_its_own(client: httpx.Client) -> None:
    answer = client.get("/other/thing", headers={"origin": ORIGIN})
    assert answer.status_code == 503
    assert ALLOWED not in answer.headers


def test_preflights_are_never_refused_and_the_gateways_word_holds(ports: tuple[int, int]) -> None:
    """A full service's 429 could not be read if the preflight before it were refused."""
    arrived, full, gate = [0], asyncio.Event(), asyncio.Event()
    asked = 2 * MAX_REQUESTS

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        arrived[0] += 1
        if arrived[0] == asked:
            full.set()
        await gate.wait()
        writer.write(b"HTTP/1.1 200 OK\r\naccess-control-allow-origin: the-gateways\r\n")
        writer.write(b"content-length: 0\r\nconnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    async def ask() -> list[httpx.Response]:
        front, back = ports
        url = f"http://127.0.0.1:{front}/v1/classify"
        server = await asyncio.start_server(serve, "127.0.0.1", back)
        async with server, httpx.AsyncClient(trust_env=False, timeout=30) as client:
            headers = {"origin": ORIGIN, "access-control-request-method": "POST"}
            asking = [
                asyncio.create_task(client.options(url, headers=headers)) for _ in range(asked)
            ]
            async with asyncio.timeout(20):
                await full.wait()
            gate.set()
            return await asyncio.gather(*asking)

    answers = asyncio.run(ask())
    assert {(a.status_code, a.headers[ALLOWED]) for a in answers} == {(200, "the-gateways")}
