"""The real HAProxy before a Gateway that says how many requests it lets in."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager, suppress

import httpx
import pytest

from app.errors import LIMIT_HEADER, REFUSED_HEADER, TIMEOUT_COPY
from app.graph.request import TIMEOUT_HEADER, ClassifyRequest, RequestAnswers
from app.launch.checks import HttpOptions
from app.settings import Settings
from tests.support.cases import cases
from tests.support.fakes import FakeService
from tests.support.gateway_behind_haproxy import gateway_of, haproxy_of
from tests.support.haproxy_configs import haproxys_errors
from tests.support.haproxy_process import MAX_REQUESTS, OPTIONS, ORIGIN, haproxy_before
from tests.support.services.processes import EVENTUALLY_S, wait_until
from tests.support.simulated_gateway import ASK_EVERY_MS

ALLOWED = "access-control-allow-origin"
PREFLIGHT = {"origin": ORIGIN, "access-control-request-method": "POST"}
Task = asyncio.Task[httpx.Response]
Ask = Callable[..., Task]


class Gated:
    """A Gateway that answers when the gate is open, and refuses above ``limit`` if that is set."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.limit: int | None = None
        self.num_inside = self.num_arrived = 0
        self.told: list[int] = []
        self.headers: dict[str, str] = {}  # of the last request

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin1").lower()
        self.num_arrived += 1
        headers = dict(line.split(": ", 1) for line in head.split("\r\n") if ": " in line)
        self.headers = headers
        self.told.append(int(headers.get(REFUSED_HEADER, 0)))
        status, more = "200 OK", ""
        if self.limit is not None and self.num_inside >= self.limit:
            status, more = "429 Too Many Requests", f"{LIMIT_HEADER}: {self.limit}\r\n"
        else:
            self.num_inside += 1
            await self.gate.wait()
            self.num_inside -= 1
        writer.write(f"HTTP/1.1 {status}\r\n{more}{ALLOWED}: the-gateways\r\n".encode())
        writer.write(b"content-length: 0\r\nconnection: close\r\n\r\n")
        await writer.drain()
        writer.close()


@pytest.fixture
def ports(free_port, tmp_path) -> Iterator[tuple[int, int]]:
    """HAProxy's, and that of the Gateway behind it."""
    front, back = free_port(), free_port()
    with haproxy_before(front, back, tmp_path):
        yield front, back


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


async def full_at(gateway: Gated, ask: Ask, num: int) -> list[Task]:
    tasks = [ask() for _ in range(num)]
    await until(lambda: gateway.num_inside == num)
    return tasks


@asynccontextmanager
async def beside(ports, path="/v1/classify"):
    """Run a Gateway; yield it and a way to send it requests through HAProxy."""
    gateway, (front, back) = Gated(), ports
    server = await asyncio.start_server(gateway.serve, "127.0.0.1", back)
    url, sent = f"http://127.0.0.1:{front}{path}", {REFUSED_HEADER: "777", "origin": ORIGIN}
    async with server, httpx.AsyncClient(timeout=20, trust_env=False) as client:

        def ask(method: str = "POST", headers: dict[str, str] = sent) -> Task:
            return asyncio.create_task(client.request(method, url, headers=headers))

        await _answering(client, url, gateway)
        yield gateway, ask


async def _answering(client: httpx.AsyncClient, url: str, gateway: Gated) -> None:
    gateway.gate.set()
    async with asyncio.timeout(20):
        while True:
            try:
                if (await client.post(url)).status_code == 200:
                    break
            except httpx.HTTPError:
                await asyncio.sleep(0.02)
    gateway.gate.clear()
    gateway.num_arrived, gateway.told = 0, []


def has_ended_or_arrived(task, gateway, inside):
    return lambda: task.done() or gateway.num_inside > len(inside)


@cases("path", "/v1/classify", "/v2/models/imagenette/infer", "/v1/models/imagenette:predict")
async def test_beyond_the_limit_some_go_on_and_say_how_many_did_not(ports, path):
    async with beside(ports, path) as (gateway, ask):
        inside, refused = await full_at(gateway, ask, MAX_REQUESTS), 0
        while gateway.num_inside < MAX_REQUESTS + 3:
            task = ask()
            await until(has_ended_or_arrived(task, gateway, inside))
            if not task.done():
                inside.append(task)
                continue
            answer = task.result()
            refused += 1
            assert (answer.status_code, answer.headers[ALLOWED]) == (429, ORIGIN)
            error = answer.json()["error"]  # that of KServe's protocols is a text
            text = error["message"] if path == "/v1/classify" else error
            assert text.startswith(f"{MAX_REQUESTS} requests are under way for each Gateway")
        gateway.gate.set()
        assert {answer.status_code for answer in await asyncio.gather(*inside)} == {200}
        assert (await ask()).status_code == 200
        assert sum(gateway.told) == refused  # and no client's own words


async def test_it_keeps_to_what_the_gateway_says_for_a_while(ports):
    async with beside(ports) as (gateway, ask):
        gateway.limit = 3
        inside = await full_at(gateway, ask, 3)
        told = await ask()
        assert told.status_code == 429
        assert LIMIT_HEADER not in told.headers
        num, since = gateway.num_arrived, time.monotonic()
        answers = [await ask() for _ in range(30)]
        assert {answer.status_code for answer in answers} == {429}
        texts = [a.json()["error"]["message"] for a in answers if a.content]
        assert any(text.startswith("3 requests are under way") for text in texts)
        assert gateway.num_arrived - num <= ((time.monotonic() - since) * 1e3 / ASK_EVERY_MS) + 1
        gateway.limit = None  # and so it says no more: the last word loses its force
        while gateway.num_inside < MAX_REQUESTS:
            task = ask()
            await until(has_ended_or_arrived(task, gateway, inside))
            if not task.done():
                inside.append(task)
        gateway.gate.set()
        assert {a.status_code for a in await asyncio.gather(*inside)} == {200}


class Held(FakeService):
    """Answers once ``is_over``."""

    is_over = False

    async def classify(self, request: ClassifyRequest) -> RequestAnswers:
        while not self.is_over:
            await asyncio.sleep(0.01)
        return await super().classify(request)


@pytest.fixture
def held(free_port, tmp_path) -> Iterator[tuple[str, Held]]:
    """HAProxy before a Gateway with as many places as it knows, and two keys: its URL, and that."""
    (keys := tmp_path / "keys").write_text("".join(f"{name}:{name * 24}\n" for name in "ab"))
    keys.chmod(0o600)
    service = Held(Settings(max_concurrent_requests=MAX_REQUESTS, api_keys_file=keys))
    http, own = HttpOptions(host="127.0.0.1", port=free_port()), (free_port(), free_port())
    url = f"http://127.0.0.1:{http.port}"
    with (
        gateway_of(service) as gateway,
        haproxy_of(http, gateway, tmp_path, own, OPTIONS, service.keys),
    ):
        wait_until(lambda: is_up(url), EVENTUALLY_S, "HAProxy finds the Gateway")
        yield url, service


def is_up(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"{url}/healthz", trust_env=False).is_success
    return False


async def test_a_key_that_floods_leaves_another_its_share_of_the_places(held):
    url, service = held
    async with httpx.AsyncClient(base_url=url, timeout=20, trust_env=False) as client:

        def ask(name: str) -> Task:
            headers = {"authorization": f"Bearer {name * 24}"}
            return asyncio.create_task(
                client.post("/v1/classify", content=b"image", headers=headers)
            )

        flood = [ask("a") for _ in range(MAX_REQUESTS)]
        await until(lambda: service.admission.num_under_way == MAX_REQUESTS)
        refused = [await ask("a") for _ in range(20)]
        assert {answer.status_code for answer in refused} == {429}
        others = [ask("b") for _ in range(MAX_REQUESTS // 2)]
        await until(lambda: service.admission.num_under_way == 3 * MAX_REQUESTS // 2)
        of_both = [await ask(name) for name in "ab" * 5]
        assert {answer.status_code for answer in of_both} == {429}
        service.is_over = True
        answers = await asyncio.gather(*flood, *others)
        assert {answer.status_code for answer in answers} == {200}
        texts = [answer.json()["error"]["message"] for answer in refused + of_both]
        by_haproxy = [text for text in texts if "for each Gateway" in text]
        assert len(by_haproxy) > len(texts) / 2


async def test_preflights_are_never_refused_and_the_gateways_word_holds(ports):
    """A full service's 429 could not be read if the preflight before it were refused."""
    async with beside(ports) as (gateway, ask):
        asked = [ask("OPTIONS", PREFLIGHT) for _ in range(2 * MAX_REQUESTS)]
        await until(lambda: gateway.num_inside == len(asked))
        gateway.gate.set()
        answers = await asyncio.gather(*asked)
    assert {(a.status_code, a.headers[ALLOWED]) for a in answers} == {(200, "the-gateways")}


async def test_a_clients_time_is_out_of_serves_sight(ports):
    """Serve would answer in plain text once it is over."""
    async with beside(ports) as (gateway, ask):
        gateway.gate.set()
        for sent, expected in (
            ({TIMEOUT_HEADER: "2.5"}, "2.5"),
            ({TIMEOUT_HEADER: "2.5", TIMEOUT_COPY: "9"}, "2.5"),
            ({TIMEOUT_HEADER: ""}, ""),
            ({TIMEOUT_COPY: "9"}, None),
        ):
            await ask(headers=sent)
            assert TIMEOUT_HEADER not in gateway.headers
            assert gateway.headers.get(TIMEOUT_COPY) == expected


def test_what_it_answers_itself_has_the_form_of_the_route(ports):
    """Nobody listens behind it."""
    message = haproxys_errors()[503, code := "not_ready"]
    url, patient = f"http://127.0.0.1:{ports[0]}", httpx.HTTPTransport(retries=9)
    paths = ("/v1/classify", "/v2/models/imagenette/infer", "/v1/models/a:predict")
    with httpx.Client(timeout=20, trust_env=False, transport=patient) as client:
        of_v1, of_v2, of_predict = (client.post(url + path) for path in paths)
    assert {of_v1.status_code, of_v2.status_code, of_predict.status_code} == {503}
    assert of_v1.headers["retry-after"] == of_v2.headers["retry-after"] == "1"
    assert of_v1.json() == {"error": {"code": code, "message": message, "request_id": ""}}
    assert of_v2.json() == of_predict.json() == {"error": f"{code}: {message}"}
