"""Headers that a client slips in, with the real HAProxy before a Gateway in a real uvicorn.

Trailers of a chunked body, a second key, and headers that only HAProxy may send: through it, and at
the Gateway's own port, which every user of the machine can reach.
"""

import json
import socket
from contextlib import suppress
from typing import NamedTuple

import httpx
import pytest

from app.environment import HA_PROXY, HAPROXY_SECRET
from app.errors import REFUSED_HEADER, SECRET_HEADER, TIMEOUT_COPY
from app.launch.checks import HttpOptions
from app.settings import Settings
from tests.support.cases import cases
from tests.support.fakes import FakeService
from tests.support.gateway_behind_haproxy import gateway_of, haproxy_of
from tests.support.haproxy_process import OPTIONS
from tests.support.services.processes import EVENTUALLY_S, wait_until

KEY, SECRET = "integration-key.0123456789abcdef", "secret-of-the-run-0123456789"
MINE, ANOTHERS = f"Authorization: Bearer {KEY}", "Authorization: Bearer another's"
FORGED = f"{REFUSED_HEADER}: 999"


class Ports(NamedTuple):
    """Where HAProxy and the Gateway behind it listen, and the Gateway's service."""

    haproxy: int
    gateway: int
    service: FakeService


@pytest.fixture(scope="module")
def ports(free_port, tmp_path_factory):
    folder, front, own = tmp_path_factory.mktemp("run"), free_port(), (free_port(), free_port())

    def answers() -> bool:
        with suppress(httpx.HTTPError):
            return httpx.get(f"http://127.0.0.1:{front}/healthz", trust_env=False).is_success
        return False

    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("TANDEM_API_KEYS", KEY), (HA_PROXY, "1"), (HAPROXY_SECRET, SECRET)):
            patch.setenv(name, value)
        service, http = FakeService(Settings()), HttpOptions(host="127.0.0.1", port=front)
        with gateway_of(service) as gateway, haproxy_of(http, gateway, folder, own, OPTIONS):
            wait_until(answers, EVENTUALLY_S, "HAProxy finds the Gateway")
            texts = [path.read_bytes() for path in folder.iterdir() if path.is_file()]
            assert not [text for text in texts if SECRET.encode() in text]
            yield Ports(front, gateway, service)


class Answer(NamedTuple):
    """The status and the fields of an answer, and the requests that HAProxy has refused by it."""

    status: int
    fields: dict
    refused: int


@pytest.fixture
def ask(ports):
    """Return what sends headers, a chunked body and its trailers, and returns the answer."""

    def send(*headers: str, trailers: tuple[str, ...] = (), port: int = ports.haproxy) -> Answer:
        first = "POST /v1/classify HTTP/1.1", "Host: x", "Connection: close"
        head = "\r\n".join([*first, *headers, "Transfer-Encoding: chunked", "", ""])
        end = "".join(f"{line}\r\n" for line in trailers)
        before = ports.service.admission.num_refused_before
        with socket.create_connection(("127.0.0.1", port), 20) as connection:
            connection.sendall(f"{head}5\r\nimage\r\n0\r\n{end}\r\n".encode())
            told = b"".join(iter(lambda: connection.recv(65536), b""))
        body = json.loads(told.partition(b"\r\n\r\n")[2])
        refused = ports.service.admission.num_refused_before - before
        return Answer(int(told.split()[1]), body, refused)

    return send


@pytest.fixture(params=["haproxy", "gateway"])
def port(ports, request) -> int:
    return getattr(ports, request.param)


def test_a_trailer_is_no_header(ask, port):
    assert ask(trailers=(MINE,), port=port).status == 401
    answer = ask(MINE, trailers=(ANOTHERS, FORGED, "X-Request-ID: of-a-trailer"), port=port)
    assert (answer.status, answer.refused) == (200, 0)
    assert answer.fields["request_id"] != "of-a-trailer"
    # Nor beside the secret, nor of the next request.
    assert ask(MINE, trailers=(f"{SECRET_HEADER}: {SECRET}", FORGED), port=port).refused == 0
    assert ask(port=port).status == 401


def test_two_keys_are_refused_whatever_they_are(ask, port):
    for second in (MINE, ANOTHERS):
        answer = ask(MINE, second, port=port)
        assert answer.status == 401
        assert "send one header" in answer.fields["error"]["message"]


@cases(
    "secrets, refused",
    ((), 0),
    ((f"{SECRET_HEADER}: another",), 0),
    ((f"{SECRET_HEADER}: \u00e9",), 0),
    ((f"{SECRET_HEADER}: {SECRET}", f"{SECRET_HEADER}: {SECRET}"), 0),
    ((f"{SECRET_HEADER}: {SECRET}",), 999),
)
def test_internal_headers_are_believed_beside_the_secret_alone(ask, ports, secrets, refused):
    at_gateway = ask(MINE, FORGED, *secrets, port=ports.gateway)
    assert (at_gateway.status, at_gateway.refused) == (200, refused)
    assert ask(MINE, FORGED, *secrets).refused == 0  # HAProxy removes a client's


def test_haproxy_is_believed(ask, ports):
    assert ask(MINE, "X-Request-Timeout-Seconds: 3", f"{TIMEOUT_COPY}: 1").status == 200
    assert ports.service.requests[-1].timeout_s == pytest.approx(2.7)
