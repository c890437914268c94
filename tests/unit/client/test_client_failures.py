"""The blocking client: what is sent again, and what ends a call without an answer."""

import ssl

import httpx
import pytest

from tandem_client import BrokenOff, Client, DeadlineExceeded, RetryPolicy, Unreachable
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
    with pytest.raises(Unreachable, match=r"no answer from http://tandem \(\w+\)") as caught:
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
    "url", ["nonsense", "127.0.0.1:8000", "http://[", "http://127.0.0.1:80000"]
)
def test_an_address_that_is_none(url):
    with Client(url, retry=RetryPolicy(base_s=0.0)) as client, pytest.raises(Unreachable) as caught:
        client.classify(b"photo")
    assert url in caught.value.message
