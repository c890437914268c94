"""The blocking client: what is sent again, and what ends a call without an answer."""

import re
import socket
import ssl

import httpx
import pytest

from tandem_client import (
    AsyncClient,
    BrokenOff,
    Client,
    DeadlineExceeded,
    RetryPolicy,
    Unreachable,
)
from tandem_client.exchange import cause_of
from tests.support.http_server import classified
from tests.support.scripted_service import Make, ScriptedService, answered, refused


def test_what_was_refused_is_sent_again_not_before_retry_after(make: Make):
    client, service, clock = make(
        refused(retry_after="2"), refused(503, "not_ready", retry_after="1"), answered("church")
    )
    assert client.classify(b"photo", timeout=20).label == "church"
    assert 2.0 <= clock.slept[0] <= 2.1
    assert 1.0 <= clock.slept[1] <= 1.2
    assert [request.content for request in service.requests] == [b"photo"] * 3
    told = [float(r.headers["x-request-timeout-seconds"]) for r in service.requests]
    assert told[0] == 20.0
    assert told[2] == pytest.approx(20 - sum(clock.slept), abs=1e-3)


def test_a_form_is_sent_again_whole(make: Make):
    done = httpx.Response(200, json={"results": [classified()] * 2, "request_id": "r"})
    client, service, _ = make(refused(), done)
    assert len(client.classify([b"first", b"second"])) == 2
    assert all(b"second" in request.content for request in service.requests)


@pytest.mark.parametrize(
    "error",
    [
        httpx.ConnectError("refused"),
        httpx.ConnectTimeout("nobody there"),
        httpx.ReadError("reset"),
        httpx.WriteError("reset"),
        httpx.RemoteProtocolError("Server disconnected without sending a response."),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_connection_that_fails_before_the_answer_is_tried_again(make: Make, error):
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


@pytest.mark.parametrize(
    "error", [httpx.ReadTimeout("slow"), httpx.WriteTimeout("slow"), httpx.PoolTimeout("full")]
)
def test_what_has_used_up_its_time_is_not(make: Make, error):
    client, service, clock = make(error)
    with pytest.raises(DeadlineExceeded, match="no answer within 3 s") as caught:
        client.classify(b"photo", timeout=3)
    assert caught.value.code == "deadline"
    assert (len(service.requests), clock.slept) == (1, [])


def test_what_a_gateway_had_when_it_died_is_sent_again(make: Make):
    """HAProxy answers so for what is too large to be asked again by itself."""
    client, service, _ = make(refused(502, "broken_off"), answered("church"))
    assert client.classify(b"photo").label == "church"
    assert len(service.requests) == 2
    client, service, _ = make(*[refused(502, "broken_off")] * 3)
    with pytest.raises(BrokenOff):  # the file may be why it died
        client.classify(b"photo")
    assert len(service.requests) == 2


@pytest.mark.parametrize(
    "error",
    [
        httpx.UnsupportedProtocol("ftp"),
        httpx.ProxyError("no"),
        # A refused certificate is an alert that httpx passes on as it is, once it comes with TLS
        # 1.3 after the handshake.
        ssl.SSLError(1, "[SSL: TLSV13_ALERT_CERTIFICATE_REQUIRED]"),
    ],
)
def test_what_will_not_get_better_is_not(make: Make, error):
    client, service, _ = make(error)
    with pytest.raises(Unreachable):
        client.classify(b"photo")
    assert len(service.requests) == 1


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("127.0.0.1:8790", "the address is '127.0.0.1:8790'; write http://127.0.0.1:8790"),
        ("localhost:8000", "write http://localhost:8000"),
        ("me:secret@service:8000", "the address is 'service:8000'; write http://service:8000"),
        ("ftp://service", "write http://service"),
        ("", "write http://HOST:PORT"),
        ("http://", "write http://HOST:PORT"),
        ("http://[::1", "http://[::1 is no address"),
        ("http://a..b", "http://a..b is no address"),
        ("http://127.0.0.1:80000", "http://127.0.0.1:80000 is no address: ports end at 65535"),
    ],
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


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (socket.gaierror(-2, "Name or service not known"), "Name or service not known"),
        (ssl.SSLError(1, "certificate verify failed"), "certificate verify failed"),
        (ConnectionResetError(104, "Connect call failed"), "Connection reset by peer"),
        (None, "ConnectError"),
    ],
)
def test_the_cause_is_the_systems_or_the_clients_name_of_it(cause, words):
    error = httpx.ConnectError("")
    error.__cause__ = cause
    assert cause_of(error) == words
