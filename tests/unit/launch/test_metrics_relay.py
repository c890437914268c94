"""The relay of metrics, between real sockets: whose scrapes it answers, and whom it cuts off.

tests/e2e/test_notified.py has Ray's own agent behind it.
"""

import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from wsgiref import simple_server

import httpx
import pytest
from prometheus_client import CollectorRegistry, Gauge, make_wsgi_app, start_http_server

from app.access import KeyFile, Keys
from app.launch import metrics_relay as relay
from app.launch.checks import free_port
from app.launch.fork_client import _show_metrics_at
from app.launch.metrics_relay import MAX_CONNECTIONS, metrics_relay

ELSEWHERE = "127.0.0.2"  # an address of this machine that Ray's agent does not listen on
NOBODYS, KEY = Keys(()), "k" * 32
QUICKLY_S = 2.0  # in which a scrape is answered, whatever others do
Address = tuple[str, int]


def registry() -> CollectorRegistry:
    """Return one whose text fills the buffers between the relay and a client that reads nothing."""
    made = CollectorRegistry()
    Gauge("ray_tandem_queue_length", "of a test " + "x" * 2**22, registry=made).set(7)
    return made


@pytest.fixture
def source_port() -> Iterator[int]:
    """Return the port of metrics as Ray's agent has them: prometheus_client's server."""
    port = free_port()
    server, thread = start_http_server(port, "127.0.0.1", registry())
    yield port
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def address(source_port: int) -> Iterator[Address]:
    with metrics_relay(*(place := (ELSEWHERE, free_port())), source_port, NOBODYS):
        yield place


def url_of(address: Address) -> str:
    return f"http://{address[0]}:{address[1]}/metrics"


def get(url: str, timeout: float = 30, **headers: str) -> httpx.Response:
    return httpx.get(url, timeout=timeout, trust_env=False, headers=headers)


def test_the_metrics_are_there_and_nothing_else(source_port: int) -> None:
    port = free_port()
    with metrics_relay(ELSEWHERE, port, source_port, NOBODYS) as url:
        assert url == f"http://{ELSEWHERE}:{port}/metrics"
        answer = get(url)
        assert answer.text == get(f"http://127.0.0.1:{source_port}/metrics").text
        assert "ray_tandem_queue_length 7.0" in answer.text
        assert answer.headers["content-type"].startswith("text/plain; version=")
        assert get(url.replace("/metrics", "/other")).status_code == 404
        assert httpx.post(url, trust_env=False).status_code == 405
    with pytest.raises(httpx.ConnectError):
        get(url)


@pytest.mark.parametrize("is_there", [True, False])
def test_ipv6_and_without_an_answer_of_the_agent_it_says_so(monkeypatch, tmp_path, is_there):
    """Prometheus calls its target down then, as it is."""
    monkeypatch.setattr(relay, "SCRAPED_WITHIN_S", 0.1)
    with socket.socket(socket.AF_UNIX) as agent:
        if is_there:
            agent.bind(str(tmp_path / "agent"))
            agent.listen()
        with metrics_relay("::1", free_port(), tmp_path / "agent", NOBODYS) as url:
            assert url.startswith("http://[::1]:")
            answer = get(url)
    why = "none within 0.1 s" if is_there else "No such file or directory"
    assert (answer.status_code, answer.text) == (503, f"no metrics from Ray's agent: {why}\n")


def test_only_who_has_the_key_reads_them(source_port: int, tmp_path: Path) -> None:
    (file := tmp_path / "key").write_text(f"prometheus:{KEY}")
    file.chmod(0o600)
    with metrics_relay(ELSEWHERE, free_port(), source_port, Keys((), KeyFile(file))) as url:
        assert get(url, authorization=f"Bearer {KEY}").status_code == 200
        assert get(url.replace("/metrics", "/livez")).text == "tandem serve runs\n"
        for authorization in ("", f"Bearer {KEY[1:]}"):
            answer = get(url, authorization=authorization)
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
            assert "tandem" not in answer.text


@pytest.mark.parametrize(
    "sent", [b"", b"GET /metrics HTTP/1.1\r\nX: ", b"GET /metrics HTTP/1.1\r\n\r\n"]
)
def test_a_crowd_of_slow_ones_keeps_no_scrape_waiting(
    address: Address, sent: bytes, caplog
) -> None:
    """They are silent, send a byte now and then, or do not read; and the last ones stop nothing."""
    with ExitStack() as slow:
        crowd = []
        for _ in range(2 * MAX_CONNECTIONS):
            one = slow.enter_context(socket.socket())
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.connect(address)
            one.sendall(sent)
            crowd.append(one)
        for _ in range(3):
            began = time.monotonic()
            assert get(url_of(address)).status_code == 200
            assert time.monotonic() - began < QUICKLY_S
            for one in crowd:
                with suppress(OSError):
                    one.sendall(b"x" if sent else b"")
    assert caplog.text == ""


def test_a_request_has_a_time_limit_as_a_whole(monkeypatch, address: Address) -> None:
    monkeypatch.setattr(relay, "REQUEST_WITHIN_S", 0.3)
    with socket.create_connection(address, timeout=30) as slow:
        began = time.monotonic()
        with suppress(OSError):
            while True:
                slow.sendall(b"x")
                time.sleep(0.05)
        assert 0.2 < time.monotonic() - began < QUICKLY_S


def test_scrapes_at_the_same_time_cost_the_agent_one() -> None:
    """And while one of it hangs, the relay ends at once."""
    with socket.create_server(("127.0.0.1", 0)) as agent, ExitStack() as stack:
        port = agent.getsockname()[1]
        stopping = stack.enter_context(ExitStack())
        stopping.enter_context(metrics_relay(ELSEWHERE, (own := free_port()), port, NOBODYS))
        for _ in range(3):
            one = stack.enter_context(socket.create_connection((ELSEWHERE, own)))
            one.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        agent.settimeout(30)
        stack.enter_context(agent.accept()[0])
        agent.settimeout(0.3)
        with pytest.raises(TimeoutError):
            agent.accept()
        began = time.monotonic()
        stopping.close()
        assert time.monotonic() - began < QUICKLY_S


def test_a_client_that_resets_is_nothing_to_print(address: Address, capfd) -> None:
    for _ in range(3):
        client = socket.create_connection(address)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.send(b"GET /metrics HTTP/1.1\r\n\r\n")
        client.close()
    assert get(url_of(address)).status_code == 200
    assert capfd.readouterr().err == ""


def test_rays_exporter_is_put_on_a_socket(monkeypatch, tmp_path: Path, capfd) -> None:
    """It asks for a port of all interfaces, and is told that it has it."""
    path = tmp_path / "scrapes.sock"
    path.touch()  # an agent's before
    monkeypatch.setattr(simple_server, "make_server", simple_server.make_server)
    _show_metrics_at(path)
    server = simple_server.make_server("", 4711, make_wsgi_app(registry()))
    assert server.server_address[1] == 4711
    assert server.socket.family == socket.AF_UNIX
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    with metrics_relay(ELSEWHERE, free_port(), path, NOBODYS) as url:
        assert "ray_tandem_queue_length 7.0" in get(url).text
    server.shutdown()
    server.server_close()
    thread.join()
