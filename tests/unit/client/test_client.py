"""The blocking client and the one for asyncio: calls, their time, many images."""

import asyncio
import io
import json
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import aclosing, closing
from dataclasses import asdict
from itertools import count
from typing import Any, cast

import httpx
import numpy as np
import pytest
from PIL import Image

from app.http.api import create_api
from tandem_client import (
    AsyncClient,
    BadAnswer,
    BadImage,
    BadRequest,
    Client,
    DeadlineExceeded,
    Erased,
    Feedback,
    RetryPolicy,
    Taught,
    TaughtFigures,
    Unauthorized,
)
from tandem_client.client import AHEAD
from tandem_client.grpc_client import GrpcClient
from tandem_client.images import encode_png
from tests.support.cases import cases
from tests.support.http_server import FakeServer, classified
from tests.support.scripted_service import ScriptedService, answered, refused
from tests.support.trickling_service import MOST_S, Trickle, TricklingService
from tests.support.virtual_loop import run_virtually

KEY = "k" * 32
NO_RETRY = RetryPolicy(max_attempts=1)
BAD = b"no image"
PHOTO, LARGE = b"photo", b"x" * 80_000_000
HTTP: list[Trickle] = ["upload", "headers", "body", "silence"]
Ask = Callable[[str, bytes, float], None]
HANGING = """
import sys
from tandem_client import Client
for result in Client(sys.argv[1]).classify_many([b"x"] * 1000, ordered=False):
    print("answered", flush=True)
"""


def test_an_image_is_the_body_and_the_answer_is_typed(make):
    stage = {"stage": "infer", "start_ms": 1.5, "duration_ms": 8.0, "member": "a", "batch_size": 4}
    more = {
        "cached": True,
        "model_version": "0123456789ab",
        "skipped_members": ["b"],
        "timings_ms": {"total": 9, "stages": [stage]},
    }
    client, service, _ = make(answered("church", **more))
    answer = client.classify(b"photo")
    assert (answer.label, answer.probability, answer.predictions[0].index) == ("church", 0.9, 0)
    assert answer.members["a"].predictions[0].label == "church"
    assert (answer.timings.total_ms, answer.timings.stages[0].batch_size) == (9.0, 4)
    assert (answer.cached, answer.skipped_members, answer.degraded) == (True, ("b",), False)
    assert answer.model_version == "0123456789ab"
    assert answer.raw == classified("church") | more
    (request,) = service.requests
    assert (request.method, str(request.url)) == ("POST", "http://tandem/v1/classify")
    assert request.content == b"photo"
    assert "authorization" not in request.headers
    assert "priority" not in request.headers


def test_what_a_call_asks_for_is_sent(make):
    client, service, _ = make(api_key=KEY)
    client.classify(b"photo", top_k=3, priority=6, timeout=2.5, model_set="a b")
    (request,) = service.requests
    assert request.url.query == b"top_k=3&model_set=a+b"
    assert request.headers["authorization"] == f"Bearer {KEY}"
    assert request.headers["priority"] == "u=6"
    assert request.headers["x-request-timeout-seconds"] == "2.500"
    assert request.headers["user-agent"].startswith("tandem-serve-client/")
    assert request.extensions["timeout"] == {"connect": 2.5, "read": 2.5, "write": 2.5, "pool": 2.5}


def models(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, json={"input_size": 28, "resize_shorter": 32})


def of_two(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, json={"results": [classified(), classified()]})


def test_large_pictures_are_shrunk_to_what_the_set_needs(make):
    large, small = (jpeg(side) for side in (600, 64))
    client, service, _ = make(models, answered(), of_two)
    client.classify(large, shrink=True)
    client.classify([small, large], shrink=True)
    list(client.classify_many([large] * 3, shrink=True))
    client.classify(large)
    asked, alone, form, *many, whole = service.requests
    assert (asked.method, asked.url.path) == ("GET", "/v1/models")
    assert [request.url.path for request in (alone, form, *many)] == ["/v1/classify"] * 5
    for request in (alone, *many):
        assert request.headers["x-tandem-shrunk"] == "600x600"
        assert side_of(request.content) == 64
    assert form.headers["x-tandem-shrunk"] == "-, 600x600"
    assert small in form.content
    assert whole.content == large
    assert "x-tandem-shrunk" not in whole.headers


def test_each_set_is_asked_once_for_its_side(make):
    client, service, _ = make(models, answered(), answered(), models)
    for name in ("a", "a", "b"):
        client.classify(jpeg(600), shrink=True, model_set=name)
    gets = [request.url.query for request in service.requests if request.method == "GET"]
    assert gets == [b"model_set=a", b"model_set=b"]


@cases("step", refused(401, "unauthorized"), httpx.ConnectError("refused"), httpx.Response(200))
def test_a_side_that_cannot_be_learnt_is_the_usual_one_and_asked_for_again(make, step):
    client, service, _ = make(step, answered(), models)
    for shorter in (512, 64):
        client.classify(jpeg(600), shrink=True)
        assert side_of(service.requests[-1].content) == shorter


def test_an_event_loop_shrinks_too_and_tasks_that_begin_together_ask_once():
    service = ScriptedService(models)

    async def ask(client):
        await asyncio.gather(*(client.classify(jpeg(600), shrink=True) for _ in range(4)))

    asked(ask, service)
    assert Counter(request.method for request in service.requests) == {"GET": 1, "POST": 4}
    assert side_of(service.requests[-1].content) == 64


def test_tasks_that_wait_for_a_side_that_is_not_learnt_do_not_ask_one_after_another():
    service = ScriptedService(httpx.ReadTimeout("silence"))

    async def ask(client):
        await asyncio.gather(*(client.classify(jpeg(600), shrink=True) for _ in range(4)))

    asked(ask, service)
    assert Counter(request.method for request in service.requests) == {"GET": 1, "POST": 4}
    assert {side_of(r.content) for r in service.requests if r.method == "POST"} == {512}


def jpeg(side: int) -> bytes:
    file = io.BytesIO()
    Image.effect_noise((side, side), 50).save(file, "JPEG")
    return file.getvalue()


def side_of(data: bytes) -> int:
    return min(Image.open(io.BytesIO(data)).size)


@cases(
    "how, wrong",
    ("classify", {"timeout": -1}),
    ("classify", {"priority": 8}),
    ("classify", {"priority": -1}),
    ("classify_many", {"concurrency": 0}),
    ("classify_many", {"concurrency": -1}),
)
def test_a_call_that_makes_no_sense(make, how, wrong):
    client, service, _ = make()
    with pytest.raises(ValueError, match="|".join(wrong)):
        getattr(client, how)(b"photo", **wrong)
    assert service.requests == []


@pytest.mark.parametrize("how", ["classify", "classify_many"])
def test_an_option_that_is_none_is_an_error_at_the_call(make, how):
    client, service, _ = make()
    with pytest.raises(TypeError, match="unexpected keyword argument 'topk'"):
        getattr(client, how)(b"photo", topk=2)
    assert service.requests == []


def asked(ask, service, **options):
    """Return what ``ask`` returns or raises, and how many seconds that took."""

    async def run() -> tuple[Any, float]:
        loop = asyncio.get_running_loop()
        async with AsyncClient("http://tandem", transport=service.transport, **options) as client:
            started = loop.time()
            try:
                said = await ask(client)
            except Exception as error:
                said = error
            return said, loop.time() - started

    return run_virtually(run())


@pytest.mark.parametrize("trickles", [True, False])
def test_a_service_that_does_not_answer_has_the_calls_time_and_no_more(trickles):
    async def hang(request: httpx.Request) -> httpx.Response:
        async def chunks():
            while True:
                await asyncio.sleep(1)
                yield b" "

        if trickles:
            return httpx.Response(200, content=chunks())
        await asyncio.sleep(3600)
        raise AssertionError("it waited an hour")

    service = ScriptedService()
    service.transport = httpx.MockTransport(hang)
    said, took_s = asked(lambda c: c.classify(b"photo", timeout=7), service)
    assert isinstance(said, DeadlineExceeded)
    assert took_s == pytest.approx(7)


async def test_it_is_answered_by_the_services_own_code(service):
    """The application itself, in this process: its fields, its errors, its form."""
    transport: Any = httpx.ASGITransport(create_api(service), raise_app_exceptions=False)
    service.skipped = ["b"]
    async with AsyncClient("http://tandem", transport=transport) as client:
        assert repr(client) == "AsyncClient('http://tandem')"
        answer = await client.classify(b"image a", top_k=2, timeout=4, priority=6)
        good, bad = await client.classify([b"image a", b"no"])
        with pytest.raises(BadImage) as caught:
            await client.classify(b"no")
    assert (answer.label, answer.skipped_members) == ("image a", ("b",))
    assert answer.raw["timings_ms"]["total"] == answer.timings.total_ms
    assert good.get().label == "image a"
    assert (bad.error.code, caught.value.status) == ("not_an_image", 400)
    one, form, _ = service.requests
    assert (one.top_k, one.timeout_s, one.lane) == (2, pytest.approx(3.6, abs=0.1), "bulk")
    assert form.files == [b"image a", b"no"]


TAUGHT = {"id": "a1", "label": "tench", "model_set": "fish"}
KEPT = {"photographs": 1, "corrections": 0, "labels": {"tench": 1}, "bytes": 5}
KEPT |= {"max_photographs": 9, "max_bytes": 99}
REPORT = {"request_id": "r1", "label": "tench", "answered": ["eel"], "right": False}
REPORT |= {"model_set": "fish", "model_version": "0123456789ab"}
ERASED = {"id": "a/1", "erased": 1, "num_gateways": 2, "num_current": 1}
ASKS: list[tuple[str, tuple, dict, str, bytes, Any]] = [
    ("teach", (b"photo", 0), {}, "POST /v1/teach?label=0", b"photo", Taught(**TAUGHT)),
    (
        "teach",
        (np.zeros((1, 1, 3), np.uint8), "a b"),
        {"channels": "rgb", "model_set": "fish"},
        "POST /v1/teach?label=a+b&model_set=fish",
        encode_png(np.zeros((1, 1, 3), np.uint8)),
        Taught(**TAUGHT, before="eel"),
    ),
    ("taught", (), {}, "GET /v1/teach", b"", TaughtFigures(**cast("Any", KEPT))),
    (
        "report",
        ("r1", "tench"),
        {"image": 0},
        "POST /v1/feedback",
        b'{"request_id":"r1","label":"tench","image":0}',
        Feedback(**cast("Any", REPORT)),
    ),
    ("erase_samples", ("a/1",), {}, "DELETE /v1/samples/a%2F1", b"", Erased(**cast("Any", ERASED))),
]


@cases("method, arguments, options, asked, body, answer", *ASKS)
def test_other_routes_are_asked_again_and_their_answers_are_typed(
    make, method, arguments, options, asked, body, answer
):
    told = httpx.Response(200, json=asdict(answer) | {"new": 1})
    client, service, clock = make(refused(503, "not_ready"), told, told)
    assert getattr(client, method)(*arguments, **options) == answer
    assert len(clock.slept) == 1

    async def ask() -> object:
        async with AsyncClient("http://tandem", transport=service.transport) as on_loop:
            return await getattr(on_loop, method)(*arguments, **options)

    assert asyncio.run(ask()) == answer
    for request in service.requests:
        target = request.url.raw_path.decode()
        assert (f"{request.method} {target}", request.content) == (asked, body)
    assert service.requests[0].extensions["timeout"]["read"] == 30


@cases(
    "step, kind, code",
    (refused(409, "taught_full"), BadRequest, "taught_full"),
    (refused(403, "forbidden"), Unauthorized, "forbidden"),
    (httpx.Response(200, json={"id": "a1"}), BadAnswer, "bad_answer"),
    (httpx.Response(200, json=[]), BadAnswer, "bad_answer"),
)
def test_errors_of_other_routes_are_those_of_classify(make, step, kind, code):
    client, _, _ = make(step, retry=NO_RETRY)
    with pytest.raises(kind) as caught:
        client.teach(b"photo", "tench")
    assert caught.value.code == code
    with pytest.raises(BadImage):
        client.teach("nowhere.jpg", "tench")


def blocking(address: str, photo: bytes, timeout_s: float) -> None:
    with Client(f"http://{address}", timeout=timeout_s) as client:
        client.classify(photo)


def on_loop(address: str, photo: bytes, timeout_s: float) -> None:
    async def ask() -> None:
        async with AsyncClient(f"http://{address}", timeout=timeout_s) as client:
            await client.classify(photo)

    asyncio.run(ask())


def by_grpc(address: str, photo: bytes, timeout_s: float) -> None:
    with GrpcClient(address, timeout=timeout_s) as client:
        client.classify(photo)


@cases(
    "ask, kind",
    *((ask, kind) for ask in (blocking, on_loop) for kind in HTTP),
    (by_grpc, "window"),
    (by_grpc, "silence"),
)
def test_a_call_ends_with_its_time(ask, kind):
    photo, timeout_s = (LARGE, 2.0) if kind == "upload" else (PHOTO, 0.5)
    started = time.monotonic()
    with TricklingService(kind) as service:
        with pytest.raises(DeadlineExceeded, match=f"no answer within {timeout_s:g} s"):
            ask(service.address, photo, timeout_s)
        assert time.monotonic() - started < MOST_S / 3


def test_a_client_that_is_closed_says_so(make):
    client, service, _ = make()
    client.classify(b"photo")
    client.close()
    client.close()
    with pytest.raises(RuntimeError, match="closed: make another"):
        client.classify(b"photo")
    assert len(service.requests) == 1


def by_body(request: httpx.Request) -> httpx.Response:
    """Answer with the body as the label; BAD is no image."""
    if request.content == BAD:
        return refused(400, "not_an_image", "no image")
    return answered(request.content.decode())


def images(num: int) -> list[bytes]:
    return [str(n).encode() for n in range(num)]


class Counted:
    """Images that count how many were taken."""

    def __init__(self, num: int) -> None:
        self.num, self.taken = num, 0

    def __iter__(self) -> Iterator[bytes]:
        for image in images(self.num):
            self.taken += 1
            yield image


class Gates:
    """A transport whose answers the test lets go, each by its body; it counts what is under way."""

    def __init__(self) -> None:
        self.gates: dict[str, asyncio.Event] = {}
        self.under_way, self.most = 0, 0
        self.transport = httpx.MockTransport(self._answer)

    def open(self, *names: object) -> None:
        for name in names:
            self.gates.setdefault(str(name), asyncio.Event()).set()

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        name = request.content.decode()
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            await self.gates.setdefault(name, asyncio.Event()).wait()
        finally:
            self.under_way -= 1
        return answered(name)


def client_of(transport: httpx.MockTransport) -> AsyncClient:
    return AsyncClient("http://tandem", transport=transport, retry=NO_RETRY)


@pytest.mark.parametrize("ordered", [True, False])
def test_every_image_has_its_result(ordered):
    with Client("http://tandem", transport=httpx.MockTransport(by_body)) as client:
        results = list(client.classify_many(images(200), ordered=ordered))
    said = {result.index: result.get().label for result in results}
    assert said == {n: str(n) for n in range(200)}
    if ordered:
        assert list(said) == sorted(said)


async def test_no_more_than_concurrency_are_under_way():
    gates = Gates()

    async def consume() -> list[str]:
        return [r.get().label async for r in client.classify_many(images(100), concurrency=5)]

    async with client_of(gates.transport) as client:
        consumer = asyncio.create_task(consume())
        for n in range(100):
            while str(n) not in gates.gates:
                await asyncio.sleep(0)
            gates.open(n - 4)  # five are there, then the first of them goes
        gates.open(*range(100))
        assert await consumer == [str(n) for n in range(100)]
    assert gates.most == 5


async def test_images_are_taken_as_places_become_free():
    gates, given = Gates(), Counted(10_000)
    gates.open(*range(10_000))
    async with client_of(gates.transport) as client:
        stream: Any = client.classify_many(given, concurrency=3)
        async with aclosing(stream):
            for n in range(50):
                assert (await anext(stream)).index == n
                assert given.taken <= n + 1 + AHEAD * 3


async def test_in_order_later_answers_wait_and_as_they_come_they_do_not():
    for ordered in (True, False):
        gates = Gates()
        async with client_of(gates.transport) as client:
            stream = client.classify_many(images(3), ordered=ordered)
            first = asyncio.ensure_future(anext(stream))
            gates.open(2)
            if ordered:
                while len(gates.gates) < 3 or gates.under_way > 2:  # the third was answered
                    await asyncio.sleep(0)
                assert not first.done()
                gates.open(0)
            assert (await first).index == (0 if ordered else 2)
            gates.open(0, 1, 2)
            assert [result.index async for result in stream] == ([1, 2] if ordered else [0, 1])


@pytest.mark.parametrize("ordered", [True, False])
def test_an_error_is_its_images_own(tmp_path, ordered):
    (tmp_path / "a.jpg").write_bytes(b"church")
    paths = [tmp_path / "a.jpg", tmp_path / "nowhere.jpg", BAD]
    with Client("http://tandem", transport=httpx.MockTransport(by_body)) as client:
        results = {r.index: r for r in client.classify_many(paths, ordered=ordered)}
    assert results[0].get().label == "church"
    assert [results[n].path for n in range(3)] == [*paths[:2], None]
    assert [results[n].error.code for n in (1, 2)] == ["unreadable", "not_an_image"]
    assert results[2].error.__traceback__ is None  # its frames would hold the image
    with pytest.raises(BadImage):
        results[1].get()


def test_an_error_ends_it_all_if_that_is_asked_for():
    before, given = threading.active_count(), Counted(1000)
    with Client("http://tandem", transport=httpx.MockTransport(by_body)) as client:
        stream = client.classify_many([b"0", BAD, *given], raise_errors=True, concurrency=2)
        assert next(stream).get().label == "0"
        with pytest.raises(BadImage):
            next(stream)
        assert list(stream) == []
    assert threading.active_count() == before


@pytest.mark.parametrize("ordered", [True, False])
def test_what_is_left_early_leaves_no_thread_and_no_request(ordered):
    before, gates, given = threading.active_count(), Gates(), Counted(1000)
    gates.open(0)
    with (
        Client("http://tandem", transport=gates.transport) as client,
        closing(cast("Any", client.classify_many(given, concurrency=4, ordered=ordered))) as stream,
    ):
        assert next(stream).get().label == "0"
    assert (threading.active_count(), gates.under_way) == (before, 0)
    assert given.taken <= 1 + 4 * AHEAD


def test_a_stream_that_nobody_begins_starts_nothing():
    before = threading.active_count()
    with Client("http://tandem", transport=ScriptedService().transport) as client:
        client.classify_many([b"photo"])
    assert threading.active_count() == before


async def test_a_task_that_is_cancelled_ends_its_requests():
    gates = Gates()
    async with client_of(gates.transport) as client:

        async def consume() -> None:
            async for _ in client.classify_many(images(100), concurrency=4):
                pass

        task = asyncio.create_task(consume())
        while gates.under_way < 4:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert gates.under_way == 0
        assert len(asyncio.all_tasks()) == 1


def test_what_the_images_raise_goes_through_and_ends_it():
    def broken() -> Iterator[bytes]:
        yield b"0"
        raise OSError("the list of files broke off")

    before = threading.active_count()
    with (
        Client("http://tandem", transport=httpx.MockTransport(by_body)) as client,
        pytest.raises(OSError, match="broke off"),
    ):
        list(client.classify_many(broken()))
    assert threading.active_count() == before


def test_an_answer_is_there_before_the_next_image_is_waited_for():
    """Images that come one at a time, as from a camera: each answer must not wait for 64 more."""
    first = threading.Event()

    def by_and_by() -> Iterator[bytes]:
        yield b"0"
        first.wait(60)
        yield b"1"

    def let_on(request: httpx.Request) -> httpx.Response:
        first.set()
        return by_body(request)

    with Client("http://tandem", transport=httpx.MockTransport(let_on)) as client:
        indexes = Counter(r.index for r in client.classify_many(by_and_by()))
    assert indexes == {0: 1, 1: 1}


async def test_more_at_a_time_than_connections():
    async with AsyncClient("http://tandem", max_connections=8) as client:
        with pytest.raises(ValueError, match="concurrency is 9, max_connections 8"):
            client.classify_many([], concurrency=9)


def test_ctrl_c_ends_it_at_once():
    """Amid requests that nobody answers: the interpreter waits for none of them."""
    all_wait, release, numbers = threading.Event(), threading.Event(), count()

    def answer(_: bytes) -> tuple[int, bytes]:
        if (number := next(numbers)) > 0:
            if number == 16:
                all_wait.set()
            release.wait(120)
        return 200, json.dumps(classified()).encode()

    with FakeServer() as server:
        server.answer = answer
        command = [sys.executable, "-c", HANGING, server.url]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            try:
                assert process.stdout.readline() == "answered\n"
                assert all_wait.wait(60)
                process.send_signal(signal.SIGINT)
                _, told = process.communicate(timeout=30)  # of a call's 30 s: not one is waited for
            finally:
                process.kill()
                release.set()
    assert process.returncode in (-signal.SIGINT, 130)
    assert "KeyboardInterrupt" in told
