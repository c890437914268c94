"""One request and its answer: options, retries on a clock of the test, addresses, failures."""

import asyncio
import logging
import re
import socket
import ssl

import httpx
import pytest

from tandem_client import (
    AsyncClient,
    BadAnswer,
    BadImage,
    BrokenOff,
    Client,
    DeadlineExceeded,
    NotReady,
    Overloaded,
    RetryPolicy,
    ServiceError,
    Unauthorized,
    Unreachable,
)
from tandem_client.exchange import Attempts, cause_of, is_loopback
from tandem_client.images import Call, CallOptions
from tests.support.cases import cases
from tests.support.hand_clock import HandClock
from tests.support.http_server import classified
from tests.support.scripted_service import ScriptedService, answered, refused

KEY = "k" * 32
FULL = Overloaded("full", "overloaded")
SAFE = [FULL, NotReady("soon"), Unreachable("no", "refused"), Unreachable("no", "reset")]

NOT_SAFE = [
    BadImage("no image"),
    DeadlineExceeded("late"),
    Unauthorized("no key"),
    ServiceError("a bug"),
    Unreachable("a certificate"),
]

OWN = (
    "http://127.0.0.1:8000",
    "https://127.9.9.9",
    "http://127.1:8000",
    "http://2130706433",
    "http://localhost:8000/",
    "http://LOCALHOST",
    "http://tandem.localhost",
    "http://me:secret@[::1]:8000",
    "http://[::ffff:127.0.0.1]:80",
    "http://0.0.0.0:8000",
    "127.0.0.1:9000",
    "localhost:9000",
)

OTHERS = (
    "http://10.0.0.1:8000",
    "http://localhost.example.com",
    "http://127.0.0.1.example.com",
    "http://127.0.0.1@example.com",
    "http://[::2]",
    "tandem:9000",
    "dns:///tandem:9000",
    "http://[",
    "",
)


def test_several_are_one_form_with_a_result_each(make, tmp_path):
    (tmp_path / "a.jpg").write_bytes(b"first")
    bad = {"error": {"code": "not_an_image", "message": "no image", "request_id": "r2"}}
    rows = {"results": [classified("church"), bad], "request_id": "r2"}
    client, service, _ = make(httpx.Response(200, json=rows))
    first, second = client.classify([tmp_path / "a.jpg", b"second"])
    assert (first.index, first.path, first.get().label) == (0, tmp_path / "a.jpg", "church")
    assert (second.index, second.path, second.answer) == (1, None, None)
    assert isinstance(second.error, BadImage)
    with pytest.raises(BadImage, match="no image"):
        second.get()
    (request,) = service.requests
    assert request.headers["content-type"].startswith("multipart/form-data")
    assert request.content.index(b"first") < request.content.index(b"second")


async def test_an_image_of_several_that_cannot_be_read_has_its_error(make, tmp_path):
    nowhere = tmp_path / "nowhere.jpg"
    rows = httpx.Response(200, json={"results": [classified("church")], "request_id": "r"})
    client, service, _ = make(rows)
    bad, good = client.classify([nowhere, b"photo"])
    assert (bad.path, good.index, good.get().label) == (nowhere, 1, "church")
    assert isinstance(bad.error, BadImage)
    assert bad.error.code == "unreadable"
    assert len(service.requests) == 1

    async with AsyncClient("http://tandem", transport=service.transport) as unasked:
        (only,) = await unasked.classify([nowhere])
    assert isinstance(only.error, BadImage)
    assert len(service.requests) == 1  # without a file there is nothing to ask


def test_a_sequence_of_one_is_a_sequence_and_of_none_no_call(make):
    client, _, _ = make(httpx.Response(200, json={"results": [classified()], "request_id": "r"}))
    (result,) = client.classify([b"photo"])
    assert result.get().label == "tench"
    client, service, _ = make()
    with pytest.raises(ValueError, match="no images"):
        client.classify([])
    assert service.requests == []


@cases(
    "answer",
    httpx.Response(200, text="<html>"),
    httpx.Response(200, json=[]),
    httpx.Response(200, json="yes"),
    httpx.Response(200, json={}),
    httpx.Response(200, json={"predictions": []}),
    httpx.Response(200, json=classified() | {"predictions": []}),
    httpx.Response(200, json=classified() | {"predictions": 3}),
    httpx.Response(200, json=classified() | {"predictions": [{"index": "x"}]}),
    httpx.Response(200, json=classified() | {"members": []}),
    httpx.Response(200, json=classified() | {"timings_ms": None}),
    httpx.Response(200, json={"results": [classified()]}),
    httpx.Response(200, content=b"\xff\xfe"),
    httpx.Response(404, json={"detail": "Not Found"}),
    httpx.Response(502, json={"error": "Bad Gateway"}),
    httpx.Response(500),
    httpx.Response(302, headers={"location": "http://other"}),
    ids=lambda answer: answer.text[:30] or str(answer.status_code),
)
def test_another_service_at_the_address(make, answer):
    client, service, _ = make(answer)
    with pytest.raises(BadAnswer, match="not as Tandem does") as caught:
        client.classify(b"photo")
    assert caught.value.status == answer.status_code
    assert str(answer.status_code) in caught.value.message
    assert len(service.requests) == 1


@pytest.mark.parametrize("num", [0, 1, 3])
def test_a_form_with_another_number_of_results(make, num):
    rows = {"results": [classified()] * num, "request_id": "r"}
    client, _, _ = make(httpx.Response(200, json=rows))
    with pytest.raises(BadAnswer):
        client.classify([b"first", b"second"])


@cases("status, kind", (429, Overloaded), (503, NotReady), (504, DeadlineExceeded))
def test_a_balancers_own_answer_goes_by_its_status(make, status, kind):
    steps = [httpx.Response(status, text="busy", headers={"retry-after": "1"})] * 2
    client, service, clock = make(*steps, retry=RetryPolicy(max_attempts=2))
    with pytest.raises(kind) as caught:
        client.classify(b"photo")
    assert caught.value.code == f"http_{status}"
    assert len(service.requests) == (1 if status == 504 else 2)
    assert all(wait >= 1.0 for wait in clock.slept)


def test_what_was_refused_is_sent_again_whole_not_before_retry_after(make):
    client, service, clock = make(
        refused(retry_after="2"), refused(503, "not_ready", retry_after="1"), answered("church")
    )
    assert client.classify(b"photo", timeout=20).label == "church"
    assert 2.0 <= clock.slept[0] <= 2.1
    assert 1.0 <= clock.slept[1] <= 1.2
    assert [request.content for request in service.requests] == [b"photo"] * 3
    told = [float(r.headers["x-request-timeout-seconds"]) for r in service.requests]
    assert (told[0], told[2]) == (20.0, pytest.approx(20 - sum(clock.slept), abs=1e-3))
    done = httpx.Response(200, json={"results": [classified()] * 2, "request_id": "r"})
    client, service, _ = make(refused(), done)
    assert len(client.classify([b"first", b"second"])) == 2
    assert all(b"second" in request.content for request in service.requests)


@cases(
    "error",
    httpx.ConnectError("refused"),
    httpx.ConnectTimeout("nobody there"),
    httpx.ReadError("reset"),
    httpx.WriteError("reset"),
    httpx.RemoteProtocolError("Server disconnected without sending a response."),
    ids=lambda error: type(error).__name__,
)
def test_a_connection_that_fails_before_the_answer_is_tried_again(make, error):
    client, service, clock = make(error, answered("church"))
    assert client.classify(b"photo").label == "church"
    assert (len(service.requests), len(clock.slept)) == (2, 1)
    never = ScriptedService(*[error] * 9)
    client = Client(
        "http://me:secret@tandem", transport=never.transport, retry=RetryPolicy(base_s=0.0)
    )
    with pytest.raises(Unreachable, match=r"no answer from http://tandem \(.+\)") as caught:
        client.classify(b"photo")
    assert caught.value.__cause__ is error
    assert len(never.requests) == 5


@cases("error", httpx.ReadTimeout("slow"), httpx.WriteTimeout("slow"), httpx.PoolTimeout("full"))
def test_what_has_used_up_its_time_is_not(make, error):
    client, service, clock = make(error)
    with pytest.raises(DeadlineExceeded, match="no answer within 3 s") as caught:
        client.classify(b"photo", timeout=3)
    assert caught.value.code == "deadline"
    assert (len(service.requests), clock.slept) == (1, [])


def test_what_a_gateway_had_when_it_died_is_sent_again(make):
    """HAProxy answers so for what is too large to be asked again by itself."""
    client, service, _ = make(refused(502, "broken_off"), answered("church"))
    assert client.classify(b"photo").label == "church"
    assert len(service.requests) == 2
    client, service, _ = make(*[refused(502, "broken_off")] * 3)
    with pytest.raises(BrokenOff):  # the file may be why it died
        client.classify(b"photo")
    assert len(service.requests) == 2


@cases(
    "error",
    httpx.UnsupportedProtocol("ftp"),
    httpx.ProxyError("no"),
    # A refused certificate is an alert that httpx passes on as it is, once it comes with TLS
    # 1.3 after the handshake.
    ssl.SSLError(1, "[SSL: TLSV13_ALERT_CERTIFICATE_REQUIRED]"),
)
def test_what_will_not_get_better_is_not(make, error):
    client, service, _ = make(error)
    with pytest.raises(Unreachable):
        client.classify(b"photo")
    assert len(service.requests) == 1


@cases(
    "url, advice",
    ("127.0.0.1:8790", "the address is '127.0.0.1:8790'; write http://127.0.0.1:8790"),
    ("localhost:8000", "write http://localhost:8000"),
    ("me:secret@service:8000", "the address is 'service:8000'; write http://service:8000"),
    ("ftp://service", "write http://service"),
    ("", "write http://HOST:PORT"),
    ("http://", "write http://HOST:PORT"),
    ("http://[::1", "http://[::1 is no address"),
    ("http://a..b", "http://a..b is no address"),
    ("http://127.0.0.1:80000", "http://127.0.0.1:80000 is no address: ports end at 65535"),
)
@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_an_address_that_is_none_is_said_before_any_call(kind, url, advice):
    with pytest.raises(ValueError, match=re.escape(advice)):
        kind(url)


def test_a_failed_connection_says_why_in_the_systems_words(free_port):
    never = RetryPolicy(max_attempts=1)
    for host in ("127.0.0.1", "localhost"):  # localhost has two addresses
        refused = pytest.raises(Unreachable, match=r"\(Connection refused\)")
        with Client(f"http://{host}:{free_port()}", retry=never) as client, refused:
            client.classify(b"photo")


@cases(
    "cause, words",
    (socket.gaierror(-2, "Name or service not known"), "Name or service not known"),
    (ssl.SSLError(1, "certificate verify failed"), "certificate verify failed"),
    (ConnectionResetError(104, "Connect call failed"), "Connection reset by peer"),
    (None, "ConnectError"),
)
def test_the_cause_is_the_systems_or_the_clients_name_of_it(cause, words):
    error = httpx.ConnectError("")
    error.__cause__ = cause
    assert cause_of(error) == words


@pytest.mark.parametrize("left_s", [1e-9, 0.0004, 0.0005, 0.001, 2.5])
def test_the_service_is_never_told_of_no_time(left_s):
    sent_s = float(Call.of(b"photo", CallOptions()).headers(left_s)["x-request-timeout-seconds"])
    assert sent_s == pytest.approx(left_s, abs=0.001)
    assert sent_s > 0


@cases(
    "wrong",
    {"timeout": 0},
    {"timeout": float("inf")},
    {"api_key": ""},
    {"api_key": "a b"},
    {"max_connections": 0},
)
def test_options_that_make_no_sense(wrong):
    with pytest.raises(ValueError, match=r"timeout|key|max_connections"):
        Client("http://tandem", **wrong)


def test_a_key_is_shown_nowhere(make, caplog):
    caplog.set_level(logging.DEBUG)
    client, _, _ = make(refused(401, "unauthorized", "no such key"), api_key=KEY)
    with pytest.raises(Unauthorized) as caught:
        client.classify(b"photo")
    assert KEY not in f"{client!r} {vars(client)} {caught.value!r} {caplog.text}"
    with pytest.raises(ValueError, match="no header can carry") as refusal:
        Client("http://tandem", api_key=f"{KEY}\n")
    assert KEY not in str(refusal.value)


def test_the_threshold_goes_with_the_address():
    assert CallOptions().query is None
    assert CallOptions(threshold=0.3).query == {"threshold": 0.3}
    assert CallOptions(top_k=2, threshold=0.3).query == {"top_k": 2, "threshold": 0.3}


@pytest.mark.parametrize("address", [*OWN, *OTHERS])
def test_what_is_this_machine(address):
    assert is_loopback(address) is (address in OWN)


def ask(url: str, how: str) -> None:
    async def on_loop() -> None:
        async with AsyncClient(url, api_key=KEY) as client:
            await client.classify(b"photo")

    if how == "async":
        asyncio.run(on_loop())
        return
    with Client(url, api_key=KEY) as client:
        assert (
            [r.get() for r in client.classify_many([b"photo"])]
            if how == "many"
            else (client.classify(b"photo"))
        )


@pytest.mark.parametrize("how", ["blocking", "async", "many"])
def test_loopback_is_asked_without_a_proxy_and_others_with_it(server, proxy, how):
    ask(server.url, how)
    assert (len(server.requests), proxy.requests) == (1, [])
    ask("http://tandem.invalid", how)
    assert len(server.requests) == 1
    assert proxy.requests == [("http://tandem.invalid/v1/classify", b"photo")]


def attempts(policy=None, timeout_s=10.0, clock=None, jitter=1.0):
    """Attempts whose random share of the longest wait is ``jitter``."""

    def uniform(low: float, high: float) -> float:
        return low + jitter * (high - low)

    return Attempts(policy or RetryPolicy(), timeout_s, clock or HandClock(), uniform)


@cases(
    "policy, error",
    *((None, error) for error in SAFE),
    (RetryPolicy(on=frozenset({"refused"})), Unreachable("no", "refused")),
)
def test_what_is_tried_again(policy, error):
    tried = attempts(policy)
    tried.begin()
    assert tried.wait_s(error) == pytest.approx(0.1)


@cases(
    "policy, error",
    *((None, error) for error in NOT_SAFE),
    (RetryPolicy(on=frozenset({"refused"})), FULL),
    (RetryPolicy(max_attempts=1), FULL),
    *((None, Overloaded("full", retry_after_s=after_s)) for after_s in (10.0, 11.0, 1e9)),
)
def test_what_is_not(policy, error):
    """The error is the service's own, also if it is time that is short."""
    tried = attempts(policy, timeout_s=10.0)
    tried.begin()
    with pytest.raises(type(error)) as caught:
        tried.wait_s(error)
    assert caught.value is error


def test_waits_double_up_to_the_longest_after_a_thousand_attempts_too():
    tried, waits = attempts(RetryPolicy(max_attempts=6, base_s=0.5, max_s=3.0), 100.0), []
    for _ in range(5):
        tried.begin()
        waits.append(tried.wait_s(FULL))
    assert waits == [0.5, 1.0, 2.0, 3.0, 3.0]
    tried.begin()
    with pytest.raises(Overloaded):
        tried.wait_s(FULL)
    tried = attempts(RetryPolicy(max_attempts=10**6, base_s=0.001, max_s=0.002), 100.0)
    for _ in range(1100):
        tried.begin()
    assert tried.wait_s(FULL) == 0.002


@pytest.mark.parametrize("after_s", [None, 3.0])
@pytest.mark.parametrize("jitter", [0.0, 0.5, 1.0])
def test_jitter_is_never_before_retry_after(jitter, after_s):
    tried = attempts(jitter=jitter)
    tried.begin()
    wait = tried.wait_s(Overloaded("full", retry_after_s=after_s))
    assert wait == pytest.approx((after_s or 0.0) + 0.1 * jitter)


def test_an_attempt_has_what_is_left_of_the_time():
    clock = HandClock()
    tried = attempts(timeout_s=10.0, clock=clock)
    assert tried.begin() == 10.0
    clock.now += 7.5
    assert tried.begin() == 2.5
    clock.now += 2.5
    with pytest.raises(DeadlineExceeded, match=r"no answer within 10 s; .*timeout"):
        tried.begin()


@pytest.mark.parametrize("wrong", [{"max_attempts": 0}, {"base_s": -1}, {"max_s": -1}])
def test_a_policy_that_makes_no_sense(wrong):
    with pytest.raises(ValueError, match="at least 1 attempt"):
        RetryPolicy(**wrong)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf")])
def test_a_time_that_is_none(timeout):
    with pytest.raises(ValueError, match="a number above 0"):
        attempts(timeout_s=timeout)
