"""The real HAProxy of a cluster's node: a Gateway dies or is silent, or no application is known."""

import asyncio
from contextlib import suppress
from functools import partial

import httpx

from app.environment import GATEWAY_TIMEOUT
from tests.support.cases import cases
from tests.support.haproxy_configs import haproxys_errors
from tests.support.haproxy_process import HTTP, haproxy_before

TIMEOUT_S = 0.5  # for a Gateway's answer
LOAD = "/v2/repository/models/a/load"
BODY = bytes(40_000)  # more than HAProxy waits for where it does not repeat requests
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
NO_APPLICATION = """\
frontend http_frontend
    bind 127.0.0.1:{front}
    default_backend default_backend
backend default_backend
    http-request return status 404
"""


class Gateways:
    """Two; the first request is answered after ``delay_s``, or never as the Gateway dies (None)."""

    def __init__(self, delay_s: float | None) -> None:
        self.delay_s = delay_s
        self.asked: list[int] = []  # the Gateway of each request that arrived whole

    async def serve(self, number, reader, writer):
        with suppress(asyncio.CancelledError):  # at the end of the test
            await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(len(BODY))
            self.asked.append(number)
            is_first = len(self.asked) == 1
            if is_first and self.delay_s:
                await asyncio.sleep(self.delay_s)
            if self.delay_s is not None or not is_first:
                writer.write(ANSWER)
        writer.close()


async def ask(port: int, path: str) -> httpx.Response:
    """Post to HAProxy, as soon as it listens."""
    transport = httpx.AsyncHTTPTransport(retries=9)
    async with httpx.AsyncClient(transport=transport, trust_env=False, timeout=30) as client:
        return await client.post(f"http://127.0.0.1:{port}{path}", content=BODY)


@cases(
    "path, delay_s, num_asked",
    ("/v1/classify", 0.0, 1),
    ("/v1/classify", None, 2),  # it died
    ("/v1/classify", 20.0, 2),  # it is silent
    (LOAD, 3 * TIMEOUT_S, 1),  # it takes its time: no other may load meanwhile
)
async def test_a_second_gateway_is_asked_but_never_to_load(
    free_port, tmp_path, monkeypatch, path, delay_s, num_asked
):
    monkeypatch.setenv(GATEWAY_TIMEOUT, str(TIMEOUT_S))
    gateways = Gateways(delay_s)
    front, *backs = (free_port() for _ in range(3))
    sections = HTTP + f"    server two 127.0.0.1:{backs[1]}\n"
    async with (
        await asyncio.start_server(partial(gateways.serve, 0), "127.0.0.1", backs[0]),
        await asyncio.start_server(partial(gateways.serve, 1), "127.0.0.1", backs[1]),
    ):
        with haproxy_before(front, backs[0], tmp_path, sections=sections, is_cluster=True):
            assert (await ask(front, path)).status_code == 200
    assert len(set(gateways.asked)) == len(gateways.asked) == num_asked


async def test_a_node_that_knows_no_application_is_not_ready(free_port, tmp_path):
    front = free_port()
    with haproxy_before(front, 0, tmp_path, sections=NO_APPLICATION, is_cluster=True):
        answer = await ask(front, "/v1/classify")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    message = haproxys_errors()[503, code := "not_ready"]
    assert answer.json()["error"] == {"code": code, "message": message, "request_id": ""}
