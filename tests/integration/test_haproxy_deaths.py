"""The real HAProxy, with all of Serve's configuration, before a Gateway that dies or hangs.

Clients keep their connections. tests/e2e/test_kept_connections.py does it to a real service.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

import httpx
import pytest

from app.environment import BUFFER_BYTES, HEADER_BYTES, KIB, OWN_BUFFER_BYTES, serve_environment
from app.launch.haproxy import HaproxyCommand
from app.launch.haproxy_rules import RuleOptions
from tests.support.haproxy_configs import write_serves_config
from tests.support.haproxy_process import running
from tests.support.services.processes import EVENTUALLY_S

NUM_CLIENTS = 6
PATH = "/v1/classify"
LATE_S = 3.0  # later than HAProxy would allow if it took such a limit for 0 s, or for 1
LEFT_WITHIN_S = 9.0  # 5 s where nothing else runs
FITS = OWN_BUFFER_BYTES - HEADER_BYTES  # a body that HAProxy can keep
HEALTHY = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
SERVES_REFUSAL = b"HTTP/1.1 429 No\r\ncontent-type: text/plain\r\ncontent-length: 4\r\n\r\nbusy"


class Gateway:
    """Answers with its name; ``fate`` says what it does from the request on that sets it."""

    def __init__(self, name: str, answer: bytes = b"") -> None:
        self.name, self.fate = name, ""
        text = f"HTTP/1.1 200 OK\r\ncontent-length: {len(name)}\r\n\r\n{name}"
        self.answer = answer or text.encode()
        self.writers: list[asyncio.StreamWriter] = []
        self.server: asyncio.Server | None = None
        self.num_waiting = 0

    @asynccontextmanager
    async def listening(self, port: int) -> AsyncIterator[None]:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        try:
            yield
        finally:
            self.die()

    def die(self) -> None:
        """What kill -9 does: nobody listens, and every connection is reset."""
        assert self.server is not None
        self.server.close()
        for writer in self.writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        with suppress(asyncio.IncompleteReadError, asyncio.CancelledError, OSError):
            while head := (await reader.readuntil(b"\r\n\r\n")).lower():
                is_check = head.startswith(b"get ")
                if not is_check:
                    length = int(head.partition(b"content-length: ")[2].partition(b"\r")[0])
                    await reader.readexactly(length)
                if self.fate == "hangs":
                    return await asyncio.sleep(EVENTUALLY_S)
                if self.fate == "late":
                    await asyncio.sleep(LATE_S)
                if self.fate == "dies" and not is_check:
                    self.num_waiting += 1
                    if self.num_waiting == NUM_CLIENTS:
                        return self.die()
                    continue
                writer.write(HEALTHY if is_check else self.answer)


class Places:
    """HAProxy's port, and those of a Gateway and of Serve's proxy."""

    def __init__(self, free_port) -> None:
        self.front, self.gateway, self.serve = free_port(), free_port(), free_port()


@pytest.fixture
def places(free_port) -> Places:
    return Places(free_port)


@contextmanager
def haproxy(places: Places, folder, free_port, monkeypatch, **options) -> Iterator[None]:
    ports = (free_port(), free_port())
    environment = serve_environment(folder, ports)
    monkeypatch.setenv(BUFFER_BYTES, environment[BUFFER_BYTES])
    config = write_serves_config(
        folder / "haproxy.cfg",
        ports=ports,
        http_port=places.front,
        replicas={"http": places.gateway},
        fallback=places.serve,
        bufsize=OWN_BUFFER_BYTES,
        timeout_connect_s=1,
        observe_error_limit=int(environment["RAY_SERVE_HAPROXY_OBSERVE_ERROR_LIMIT"]),
        health_check_inter=environment["RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER"],
    )
    command = HaproxyCommand(folder / "haproxy", ports)
    command.write(RuleOptions(max_requests=99, **options))
    with running(command, config):
        yield


async def asked(places, gateway, fate: str, body: bytes, path: str = PATH, **headers: str):
    """Return what each client gets on a connection that it has used before."""
    url = f"http://127.0.0.1:{places.front}{path}"
    clients = [httpx.AsyncClient(trust_env=False, timeout=EVENTUALLY_S) for _ in range(NUM_CLIENTS)]
    connect = httpx.AsyncHTTPTransport(retries=9)
    async with httpx.AsyncClient(transport=connect, trust_env=False) as first:
        await first.post(url, content=b"is it there?")
    for _ in range(2):  # with the second, HAProxy's connections are reused
        for answer in await asyncio.gather(*(c.post(url, content=body) for c in clients)):
            assert answer.text == gateway.name
    gateway.fate = fate
    answers = await asyncio.gather(*(c.post(url, content=body, headers=headers) for c in clients))
    for client in clients:
        await client.aclose()
    return answers


def codes(answers: list[httpx.Response]) -> set[tuple[int, str, str]]:
    return {(a.status_code, a.headers["retry-after"], a.json()["error"]["code"]) for a in answers}


@pytest.mark.parametrize("num_bytes", [11 * KIB, FITS, 400 * KIB])
async def test_on_kept_connections_small_requests_are_sent_again_and_large_ones_answered(
    places, tmp_path, free_port, monkeypatch, num_bytes
):
    """Of a reused connection that breaks HAProxy tells a client nothing, by itself."""
    gateway, serve = Gateway("gateway"), Gateway("serve")
    with haproxy(places, tmp_path, free_port, monkeypatch):
        async with gateway.listening(places.gateway), serve.listening(places.serve):
            answers = await asked(places, gateway, "dies", bytes(num_bytes))
    if num_bytes <= FITS:
        assert [answer.text for answer in answers] == ["serve"] * NUM_CLIENTS
    else:
        assert codes(answers) == {(502, "1", "broken_off")}


async def test_a_request_that_changes_something_is_not_sent_again(
    places, tmp_path, free_port, monkeypatch
):
    gateway, serve = Gateway("gateway"), Gateway("serve")
    with haproxy(places, tmp_path, free_port, monkeypatch):
        async with gateway.listening(places.gateway), serve.listening(places.serve):
            answers = await asked(places, gateway, "dies", bytes(KIB), path="/v1/feedback")
    assert codes(answers) == {(502, "1", "broken_off")}


@pytest.mark.parametrize(
    ("answer_timeout_ms", "headers"),
    [(500, {}), (60_000, {"x-request-timeout-seconds": "0.5"})],
    ids=["the service's limit", "the client's limit"],
)
async def test_a_request_to_a_gateway_that_hangs_is_answered_in_time(
    places, tmp_path, free_port, monkeypatch, answer_timeout_ms, headers
):
    gateway = Gateway("gateway")
    with haproxy(places, tmp_path, free_port, monkeypatch, answer_timeout_ms=answer_timeout_ms):
        async with gateway.listening(places.gateway):
            answers = await asked(places, gateway, "hangs", bytes(11 * KIB), **headers)
    assert codes(answers) == {(504, "1", "deadline")}


async def test_a_gateway_that_hangs_is_left_before_serve_replaces_it(
    places, tmp_path, free_port, monkeypatch
):
    """Two checks of 2 s each. Serve takes 14 s, and HAProxy's own five seconds made it 15."""
    gateway, serve, told = Gateway("gateway"), Gateway("serve"), ""
    client = httpx.AsyncClient(trust_env=False, timeout=EVENTUALLY_S)
    with haproxy(places, tmp_path, free_port, monkeypatch, answer_timeout_ms=200):
        async with gateway.listening(places.gateway), serve.listening(places.serve), client:
            await asked(places, gateway, "hangs", bytes(11 * KIB))
            ends = time.monotonic() + LEFT_WITHIN_S
            while told != "serve":
                assert time.monotonic() < ends
                url = f"http://127.0.0.1:{places.front}{PATH}"
                told = (await client.post(url, content=b"x")).text


async def test_a_gateway_that_is_full_says_so_itself(places, tmp_path, free_port, monkeypatch):
    gateway = Gateway("gateway", SERVES_REFUSAL)
    with haproxy(places, tmp_path, free_port, monkeypatch):
        connect = httpx.AsyncHTTPTransport(retries=9)
        client = httpx.AsyncClient(transport=connect, trust_env=False)
        async with gateway.listening(places.gateway), client:
            answer = await client.post(f"http://127.0.0.1:{places.front}{PATH}", content=b"x")
    assert (answer.status_code, answer.text) == (429, "busy")


@pytest.mark.parametrize("limit", ["-5", "inf", "1e6"])
async def test_a_time_limit_that_is_no_plain_number_is_left_to_the_gateway(
    places, tmp_path, free_port, monkeypatch, limit
):
    gateway = Gateway("gateway")
    with haproxy(places, tmp_path, free_port, monkeypatch, answer_timeout_ms=60_000):
        async with gateway.listening(places.gateway):
            answers = await asked(
                places, gateway, "late", b"x", **{"x-request-timeout-seconds": limit}
            )
    assert {answer.text for answer in answers} == {"gateway"}


async def test_a_refusal_of_serves_own_is_in_our_form(places, tmp_path, free_port, monkeypatch):
    gateway, serve = Gateway("gateway"), Gateway("serve", SERVES_REFUSAL)
    with haproxy(places, tmp_path, free_port, monkeypatch):
        async with gateway.listening(places.gateway), serve.listening(places.serve):
            answers = await asked(places, gateway, "dies", bytes(11 * KIB))
    assert codes(answers) == {(503, "1", "not_ready")}


def test_haproxy_is_looked_at_often_enough(tmp_path):
    """Three checks must fail, each of which takes two of the loops of Serve's controller."""
    values = serve_environment(tmp_path, (1, 2))
    loop_s = float(values["RAY_SERVE_CONTROL_LOOP_INTERVAL_S"])
    assert float(values["RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S"]) < loop_s
    assert 3 * 2 * loop_s <= 2


@pytest.mark.parametrize("path", ["/readyz", "/v2/health/ready"])
async def test_while_serves_proxy_answers_for_a_gateway_the_service_is_not_ready(
    places, tmp_path, free_port, monkeypatch, path
):
    """It hands no trace on, so the first request after "ready" must find a Gateway."""
    connect = httpx.AsyncHTTPTransport(retries=9)
    url = f"http://127.0.0.1:{places.front}"
    with haproxy(places, tmp_path, free_port, monkeypatch):
        async with (
            Gateway("serve").listening(places.serve),
            httpx.AsyncClient(transport=connect, trust_env=False) as client,
        ):
            while (await client.post(f"{url}{PATH}", content=b"x")).text != "serve":
                await asyncio.sleep(0.05)  # the Gateway is tried first
            answer = await client.get(f"{url}{path}")
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert "HAProxy has found no replica yet" in answer.text
            async with Gateway("gateway").listening(places.gateway):
                while (await client.get(f"{url}{path}")).status_code == 503:
                    await asyncio.sleep(0.05)
                assert (await client.post(f"{url}{PATH}", content=b"x")).text == "gateway"
