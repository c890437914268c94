"""What balancers and hosts ask: HAProxy's check, SageMaker, Vertex AI, and the PROXY protocol.

With the real HAProxy before a Gateway in a real uvicorn.
"""

import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from app.environment import HA_PROXY, HAPROXY_LOG, HAPROXY_SECRET
from app.launch.checks import HttpOptions
from app.settings import Settings
from tests.support.fakes import FakeService
from tests.support.gateway_behind_haproxy import gateway_of, haproxy_of
from tests.support.haproxy_process import OPTIONS
from tests.support.services.processes import EVENTUALLY_S, wait_until

CALLER, PHOTO = "203.0.113.9", b"image"  # for the fake service
V1 = f"PROXY TCP4 {CALLER} 192.0.2.1 40000 443\r\n".encode()
V2_START = b"\r\n\r\n\x00\r\nQUIT\n"
ADDRESSES = (
    socket.inet_aton(CALLER) + socket.inet_aton("192.0.2.1") + struct.pack(">HH", 40000, 443)
)
V2 = V2_START + b"\x21\x11" + struct.pack(">H", len(ADDRESSES)) + ADDRESSES
LOCAL = V2_START + b"\x20\x00\x00\x00"  # a balancer's own check
ENDPOINT = "/v1/endpoints/123/deployedModels/456"  # as Vertex AI names them


def exchanged(port: int, sent: bytes) -> bytes:
    """Return all that comes back on a connection on which this is sent."""
    with socket.create_connection(("127.0.0.1", port), EVENTUALLY_S) as connection:
        connection.sendall(sent)
        with suppress(ConnectionResetError):
            return b"".join(iter(lambda: connection.recv(4096), b""))
    return b""


@contextmanager
def front(
    folder: Path, free_port, options=OPTIONS, begins=b""
) -> Iterator[tuple[int, FakeService]]:
    """Run HAProxy before a Gateway; yield its port once it has found it, and the service.

    ``begins`` is what each connection begins with.
    """
    port, own, service = free_port(), (free_port(), free_port()), FakeService(Settings())
    check = begins + b"GET /healthz HTTP/1.0\r\n\r\n"

    def is_up() -> bool:
        with suppress(ConnectionRefusedError):
            return b" 200 OK" in exchanged(port, check)
        return False

    http = HttpOptions(host="127.0.0.1", port=port)
    with gateway_of(service) as gateway, haproxy_of(http, gateway, folder, own, options):
        wait_until(is_up, EVENTUALLY_S, "HAProxy finds the Gateway")
        yield port, service


@pytest.fixture(scope="module")
def port(tmp_path_factory, free_port):
    options = OPTIONS._replace(health_route=ENDPOINT, predict_route=f"{ENDPOINT}:predict")
    with front(tmp_path_factory.mktemp("run"), free_port, options) as (port, _):
        yield port


@pytest.fixture
def client(port):
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
        yield client


def test_haproxys_default_check_has_no_host_and_an_old_version(port):
    assert exchanged(port, b"OPTIONS / HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 204 ")


@pytest.mark.parametrize("path", ["/ping", ENDPOINT])
def test_a_host_asks_whether_the_service_is_ready(client, path):
    for method in ("GET", "HEAD"):
        assert client.request(method, path).status_code == 200


@pytest.mark.parametrize("path", ["/invocations", f"{ENDPOINT}:predict"])
@pytest.mark.parametrize("kind", ["image/jpeg", "image/png", "application/x-image", None])
def test_a_host_sends_an_image(client, path, kind):
    headers = {} if kind is None else {"content-type": kind}
    answer = client.post(path, content=PHOTO, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.json()["predictions"][0]["label"] == PHOTO.decode()


def test_another_method_on_a_hosts_path_is_answered_as_on_ours(client):
    assert client.post(ENDPOINT, content=PHOTO).status_code == 404
    assert client.get(f"{ENDPOINT}:predict").status_code == 405


@pytest.mark.parametrize("begins", [V1, V2], ids=["v1", "v2"])
def test_the_proxy_protocol_says_who_calls(tmp_path, free_port, monkeypatch, begins):
    """HAProxy's log has the caller's address, and so does the Gateway, for its limits."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as syslog:
        syslog.bind(("127.0.0.1", 0))
        syslog.settimeout(EVENTUALLY_S)
        target = f"127.0.0.1:{syslog.getsockname()[1]}"
        for name, value in ((HAPROXY_LOG, target), (HA_PROXY, "1"), (HAPROXY_SECRET, "s" * 32)):
            monkeypatch.setenv(name, value)
        options = OPTIONS._replace(accepts_proxy=True)
        with front(tmp_path, free_port, options, LOCAL) as (port, service):
            head = f"POST /v1/classify HTTP/1.1\r\nHost: x\r\nContent-Length: {len(PHOTO)}\r\n"
            close = b"Connection: close\r\n\r\n"
            assert b"200 OK" in exchanged(port, begins + head.encode() + close + PHOTO)
            assert service.requests[-1].caller.name == CALLER
            line = ""
            while "POST /v1/classify" not in line:
                line = syslog.recv(8192).decode()
            assert f" {CALLER}:40000 " in line
            assert b"200 OK" not in exchanged(port, b"GET /healthz HTTP/1.0\r\n\r\n")
