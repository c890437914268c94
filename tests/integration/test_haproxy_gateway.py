"""HAProxy, with all of Serve's configuration, before the HTTP interface in a real uvicorn.

What both answer to good and odd requests is tested with a whole service: tests/e2e/shipped.
"""

import asyncio
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from app.errors import NotReadyError
from app.launch.checks import HttpOptions
from app.launch.haproxy import MOST_CONNECTIONS
from app.launch.haproxy_rules import RuleOptions
from app.settings import Settings
from tests.support.cases import cases
from tests.support.fakes import FakeService
from tests.support.gateway_behind_haproxy import gateway_of, haproxy_of, num_asked, num_open
from tests.support.haproxy_process import OPTIONS
from tests.support.services.processes import EVENTUALLY_S, wait_until
from tests.support.slow_clients import KINDS, Cut, linger

HASTY_S = 1
NUM_SLOW_OF_A_KIND, NUM_GOOD = 2, 30


IMAGE = b"image"  # for the fake service
KEY = "a-key-of-these-tests-0123456789"
PROBE = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
HALF = b"POST /v1/classify HTTP/1.1\r\nHost: x\r\nContent-Length: 99999\r\n\r\n" + bytes(15_500)


def key_headers(key: str = KEY) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


def answers(port: int) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"http://127.0.0.1:{port}/healthz", trust_env=False).is_success
    return False


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(EVENTUALLY_S):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
def port_of(free_port, tmp_path):
    """Start HAProxy before a service with options; return its port."""
    with ExitStack() as stack:

        def start(service: FakeService, options: RuleOptions) -> int:
            front, own = free_port(), (free_port(), free_port())
            http = HttpOptions(host="127.0.0.1", port=front)
            gateway = stack.enter_context(gateway_of(service))
            stack.enter_context(haproxy_of(http, gateway, tmp_path, own, options))
            wait_until(lambda: answers(front), EVENTUALLY_S, "HAProxy finds the Gateway")
            return front

        yield start


@pytest.fixture
def hasty_port(port_of):
    """HAProxy's port; a request begins within a second, and its body is there after another."""
    settings = Settings(max_body_bytes=2_000_000, request_timeout_s=HASTY_S)
    return port_of(FakeService(settings), OPTIONS._replace(begin_within_s=HASTY_S))


def test_slow_and_idle_clients_are_cut_and_good_ones_served_meanwhile(hasty_port):
    cuts, good = asyncio.run(_beside_slow_clients(hasty_port))
    assert good == {200}
    assert {(cut.kind, cut.status) for cut in cuts} == {(kind, 408) for kind in KINDS}
    assert len(cuts) == NUM_SLOW_OF_A_KIND * len(KINDS)


@pytest.mark.parametrize("num_came", [1000, 100_000])  # HAProxy waits for the first, or the Gateway
def test_a_body_that_is_shorter_than_announced_is_told_so_and_the_connection_ends(
    hasty_port, num_came
):
    head = b"POST /v1/classify HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    with socket.create_connection(("127.0.0.1", hasty_port), EVENTUALLY_S) as client:
        client.sendall(head % (num_came + 2) + bytes(num_came))
        client.settimeout(20)  # the client's time limit is 30 s
        answer = b"".join(iter(partial(client.recv, 2**16), b""))
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"application/json" in answer
    assert b'"slow_body"' in answer
    assert b"%d of %d bytes" % (num_came, num_came + 2) in answer


def test_a_caller_without_a_key_is_the_address_that_haproxy_sees(port_of):
    """What a client says of itself in HAProxy's own header is gone."""
    service = FakeService(Settings(trusted_proxies=("127.0.0.0/8",)))
    url = f"http://127.0.0.1:{port_of(service, OPTIONS)}/v1/classify"
    for headers in ({}, {"x-forwarded-for": "198.51.100.1, 203.0.113.5"}):
        sent = {"x-tandem-address": "192.0.2.1"} | headers
        httpx.post(url, content=b"image", headers=sent, trust_env=False).raise_for_status()
    names = [request.caller.name for request in service.requests]
    assert names == ["127.0.0.1", "203.0.113.5"]


async def _beside_slow_clients(port: int) -> tuple[list[Cut], set[int]]:
    slow = [
        asyncio.create_task(linger("127.0.0.1", port, kind, EVENTUALLY_S, every_s=0.1))
        for kind in [*KINDS] * NUM_SLOW_OF_A_KIND
    ]
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
        good = {
            (await client.post("/v1/classify", content=IMAGE)).status_code for _ in range(NUM_GOOD)
        }
    return await asyncio.gather(*slow), good


class Crowded(NamedTuple):
    """HAProxy before a Gateway with keys, and what a crowd without a key sends."""

    port: int
    service: FakeService
    folder: Path

    def client(self, **headers: str) -> httpx.AsyncClient:
        url = f"http://127.0.0.1:{self.port}"
        return httpx.AsyncClient(base_url=url, trust_env=False, headers=headers, timeout=30)

    async def probes(self, path: str, over: asyncio.Event, told: Counter[int]) -> None:
        """Probe without a pause."""
        async with self.client() as client:
            while not over.is_set():
                told[(await client.get(path)).status_code] += 1

    async def trickle(self, over: asyncio.Event, told: Counter[int]) -> None:
        """Begin a body, read the answer, and do it again."""
        while not over.is_set():
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            writer.write(HALF)
            told[int((await reader.read(1000))[9:12])] += 1
            writer.close()


@pytest.fixture
def crowded(free_port, tmp_path):
    with keyed_gateway(free_port, tmp_path) as crowded:
        yield crowded


@contextmanager
def keyed_gateway(free_port, tmp_path, *, is_cluster=False):
    (keys := tmp_path / "keys").write_text(KEY)
    keys.chmod(0o600)
    service = FakeService(Settings(max_body_bytes=2_000_000, api_keys_file=keys))
    crowded = Crowded(free_port(), service, tmp_path)
    http, own = HttpOptions(host="127.0.0.1", port=crowded.port), (free_port(), free_port())
    with (
        gateway_of(service) as gateway,
        haproxy_of(
            *(http, gateway, tmp_path, own, OPTIONS),
            keys=None if is_cluster else service.keys,
            is_cluster=is_cluster,
        ),
    ):
        wait_until(lambda: answers(crowded.port), EVENTUALLY_S, "HAProxy finds the Gateway")
        yield crowded


async def test_who_has_no_key_takes_no_place_and_does_not_reach_the_gateway(crowded):
    """As many as there are places would be refused before, with a key too."""
    told, over, started = Counter[int](), asyncio.Event(), time.monotonic()
    crowd = [asyncio.create_task(crowded.trickle(over, told)) for _ in range(150)]
    before = num_asked(crowded.folder)
    async with crowded.client(**key_headers()) as client:
        good = [(await client.post("/v1/classify", content=IMAGE)).status_code for _ in range(50)]
    assert num_asked(crowded.folder) - before == len(good)
    over.set()
    await asyncio.gather(*crowd)
    assert set(good) == {200}
    assert set(told) == {401}
    # After 50 in a second each connection's next one is answered half a second later.
    assert told[401] <= 350 * (time.monotonic() - started + 1)


@cases(
    "path",
    "/healthz",
    "/readyz",
    # make test: the others, of which these are the second names
    *(pytest.param(f"/v2/health/{what}", marks=pytest.mark.slow) for what in ("live", "ready")),
)
async def test_a_flood_of_probes_asks_the_gateway_now_and_then(crowded, path):
    told, over, started = Counter[int](), asyncio.Event(), time.monotonic()
    async with crowded.client() as client:
        by_gateway = await client.get(path)
        before = num_asked(crowded.folder)
        by_haproxy = [await client.request(verb, path) for verb in ("GET", "HEAD")]
        for answer, content in zip(by_haproxy, (by_gateway.content, b""), strict=True):
            assert (answer.status_code, answer.content) == (200, content)
            for name in ("content-type", "content-length"):
                assert answer.headers[name] == by_gateway.headers[name]
        crowd = [asyncio.create_task(crowded.probes(path, over, told)) for _ in range(20)]
        await until(lambda: told.total() > 100)
        over.set()
        await asyncio.gather(*crowd)
    assert set(told) == {200}
    assert num_asked(crowded.folder) - before <= 2 + (time.monotonic() - started) / 0.25


@pytest.mark.slow  # make test: the flood of probes, above
async def test_a_flood_that_begins_all_at_once_is_told_no_failure(crowded):
    await asyncio.sleep(1.1)  # what the Gateway said holds no longer
    told, over = Counter[int](), asyncio.Event()
    crowd = [asyncio.create_task(crowded.probes("/readyz", over, told)) for _ in range(150)]
    await until(lambda: told.total() > 200)
    over.set()
    await asyncio.gather(*crowd)
    assert set(told) == {200}


async def test_a_probe_that_is_no_http_says_nothing_of_the_service(crowded):
    """HAProxy lets the header pass; the Gateway answers 400."""
    bad = b"GET /readyz HTTP/1.1\r\nHost: x\r\nX: \x01\r\nConnection: close\r\n\r\n"
    async with crowded.client() as client:
        for _ in range(5):
            await asyncio.sleep(0.3)  # the Gateway is asked again
            reader, writer = await asyncio.open_connection("127.0.0.1", crowded.port)
            writer.write(bad)
            status = (await reader.read())[9:12]
            writer.close()
            assert status == b"400"
            assert (await client.get("/readyz")).status_code == 200


async def test_readiness_turns_in_a_flood_of_probes(crowded):
    told, over = Counter[int](), asyncio.Event()
    crowd = [asyncio.create_task(crowded.probes("/readyz", over, told)) for _ in range(20)]
    await until(lambda: told[200] > 50)
    async with crowded.client() as client:
        for error, status in ((NotReadyError("a member is gone"), 503), (None, 200)) * 2:
            crowded.service.not_ready, changed = error, time.monotonic()
            while (answer := await client.get("/readyz")).status_code != status:
                assert time.monotonic() - changed < 10, answer.text
            assert (await client.get("/v2/health/ready")).status_code == status
            assert (await client.get("/healthz")).status_code == 200
            if error:
                assert answer.json()["error"]["code"] == NotReadyError.code
                assert answer.headers["retry-after"] == "1"
    over.set()
    await asyncio.gather(*crowd)
    assert set(told) == {200, 503}


@cases("path, status, number", ("/docs/assets/nothing", 404, 400), ("/-/routes", 503, 130))
async def test_what_needs_no_key_has_a_limit(crowded, path, status, number):
    """With a key the page has none."""
    told = b""
    async with asyncio.timeout(EVENTUALLY_S):
        while b" 429 " not in told:
            reader, writer = await asyncio.open_connection("127.0.0.1", crowded.port)
            head = f"HEAD {path} HTTP/1.1\r\nHost: x\r\n".encode()
            writer.write((head + b"\r\n") * number + head + b"Connection: close\r\n\r\n")
            told = await reader.read()
            writer.close()
            assert f"HTTP/1.1 {status} ".encode() in told
    async with crowded.client(**key_headers()) as client:
        assert (await client.get("/docs/assets/nothing")).status_code == 404


# make test: silent ones of another address
@cases("address", pytest.param("127.0.0.1", marks=pytest.mark.slow), "127.0.0.2")
@cases(
    "sent",
    pytest.param(b"", id="silent"),
    pytest.param(PROBE, marks=pytest.mark.slow, id="kept alive"),
)
async def test_idle_connections_leave_room_for_others(
    monkeypatch, free_port, tmp_path, address, sent
):
    """There are more than rooms, from one address, and each is opened again when it is cut."""
    monkeypatch.setenv(MOST_CONNECTIONS, "256")
    writers, is_over = set[asyncio.StreamWriter](), False

    async def hold() -> None:
        while not is_over:
            await asyncio.sleep(0.1)
            with suppress(OSError):
                here = (address, 0)
                reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=here)
                writers.add(writer)
                writer.write(sent)
                with suppress(OSError):
                    while not is_over and await reader.read(1000):
                        pass
                writers.remove(writer)
                writer.close()

    with keyed_gateway(free_port, tmp_path) as crowded:
        port = crowded.port
        crowd = [asyncio.create_task(hold()) for _ in range(300)]
        await until(lambda: len(writers) > 90)
        for _ in range(3):
            async with crowded.client(**key_headers()) as client, asyncio.timeout(20):
                assert (await client.post("/v1/classify", content=IMAGE)).status_code == 200
                assert (await client.get("/readyz")).status_code == 200
            transport = httpx.AsyncHTTPTransport(uds=str(tmp_path / "local.sock"))
            async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
                assert (await client.get("/readyz")).status_code == 200
        # Of 256 HTTP has 192; nobody but this machine's own address gets one of the last quarter.
        assert num_open(tmp_path) <= (194 if address == "127.0.0.1" else 150)
        is_over = True
        for writer in writers:
            writer.close()
        await asyncio.gather(*crowd)


async def test_a_clusters_haproxy_learns_which_keys_its_gateways_accept(free_port, tmp_path):
    """It refuses who sends none; of a key that it does not know a Gateway decides."""
    new = f"{KEY}-of-another-caller"
    with keyed_gateway(free_port, tmp_path, is_cluster=True) as crowded:

        async def statuses(key: str, number: int = 1) -> list[int]:
            async with crowded.client(**key_headers(key)) as client:
                asked = [await client.post("/v1/classify", content=IMAGE) for _ in range(number)]
            return [answer.status_code for answer in asked]

        assert await statuses("") == [401]  # by the Gateway
        before = num_asked(tmp_path)
        assert await statuses("", 9) == [401] * 9
        assert num_asked(tmp_path) == before
        assert await statuses(new, 2) == [401] * 2
        assert num_asked(tmp_path) == before + 2
        assert await statuses(KEY, 3) == [200] * 3
        (tmp_path / "keys").write_text(new)
        async with asyncio.timeout(EVENTUALLY_S):
            while await statuses(new) != [200]:
                await asyncio.sleep(0.1)
        assert await statuses(KEY) == [401]
        over, told = asyncio.Event(), Counter[int]()
        crowd = [asyncio.create_task(crowded.trickle(over, told)) for _ in range(50)]
        assert await statuses(new, 20) == [200] * 20
        over.set()
        await asyncio.gather(*crowd)
        assert set(told) == {401}
