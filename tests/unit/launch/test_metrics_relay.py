"""The relay of the metrics: hands on what Ray's agent says, and that alone, to a few at a time."""

import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import httpx
import pytest
from prometheus_client import CollectorRegistry, Gauge, start_http_server

from app.launch.metrics_relay import MAX_CONNECTIONS, metrics_relay
from app.launch.ports import free_port

ELSEWHERE = "127.0.0.2"  # an address of this machine that Ray's agent does not listen on


@pytest.fixture
def source_port() -> Iterator[int]:
    """Return the port of metrics as Ray's agent has them: prometheus_client's server."""
    registry, port = CollectorRegistry(), free_port()
    Gauge("ray_tandem_queue_length", "of a test", registry=registry).set(7)
    server, thread = start_http_server(port, "127.0.0.1", registry)
    yield port
    server.shutdown()
    server.server_close()
    thread.join()


def get(url: str) -> httpx.Response:
    return httpx.get(url, timeout=30, trust_env=False)


def test_the_metrics_are_there_and_nothing_else(source_port: int) -> None:
    port = free_port()
    with metrics_relay(ELSEWHERE, port, source_port) as url:
        assert url == f"http://{ELSEWHERE}:{port}/metrics"
        answer = get(url)
        assert answer.text == get(f"http://127.0.0.1:{source_port}/metrics").text
        assert "ray_tandem_queue_length 7.0" in answer.text
        assert answer.headers["content-type"].startswith("text/plain; version=")
        assert get(url.replace("/metrics", "/other")).status_code == 404
        assert httpx.post(url, trust_env=False).status_code == 501
    with pytest.raises(httpx.ConnectError):
        get(url)


def test_ipv6(source_port: int) -> None:
    with metrics_relay("::1", free_port(), source_port) as url:
        assert url.startswith("http://[::1]:")
        assert get(url).status_code == 200


def test_without_a_source_the_answer_says_so() -> None:
    """Prometheus calls its target down then, as it is."""
    nobody = free_port()
    with metrics_relay(ELSEWHERE, free_port(), nobody) as url:
        answer = get(url)
    assert answer.status_code == 503
    assert f"no metrics from http://127.0.0.1:{nobody}/metrics" in answer.text


def test_more_connections_than_places_are_closed_and_give_way(source_port: int) -> None:
    port = free_port()
    with metrics_relay(ELSEWHERE, port, source_port) as url:
        with ExitStack() as silent:
            for _ in range(MAX_CONNECTIONS):
                silent.enter_context(socket.create_connection((ELSEWHERE, port)))
            with socket.create_connection((ELSEWHERE, port), timeout=30) as beyond:
                assert beyond.recv(1) == b""
        eventually_answered(lambda: get(url).status_code)


def eventually_answered(status: Callable[[], int]) -> None:
    """Ask until the places of those who went away are free again."""
    for _ in range(1000):
        try:
            assert status() == 200
        except httpx.TransportError:  # closed: their threads have not ended yet
            continue
        return
    pytest.fail("no place became free")


def test_a_client_that_resets_is_nothing_to_print(source_port: int, capfd) -> None:
    port = free_port()
    with metrics_relay(ELSEWHERE, port, source_port) as url:
        for _ in range(3):
            client = socket.create_connection((ELSEWHERE, port))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.send(b"GET /metrics HTTP/1.1\r\n\r\n")
            client.close()
        eventually_answered(lambda: get(url).status_code)
    assert capfd.readouterr().err == ""
