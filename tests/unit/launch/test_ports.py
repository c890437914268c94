"""The port of /metrics: the usual one, or another; one that was asked for, or none."""

import socket

import pytest

from app.errors import ConfigError
from app.launch import ports


@pytest.fixture
def taken():
    with socket.socket() as owner:
        owner.bind(("127.0.0.1", 0))
        owner.listen()
        yield owner.getsockname()[1]


def test_the_usual_port(monkeypatch):
    usual = ports.free_port()
    monkeypatch.setattr(ports, "METRICS_PORT", usual)
    assert ports.metrics_port(None) == usual


def test_another_one_if_a_second_service_has_it(monkeypatch, taken):
    monkeypatch.setattr(ports, "METRICS_PORT", taken)
    assert ports.metrics_port(None) != taken


def test_one_that_was_asked_for_and_is_taken_is_refused(taken):
    with pytest.raises(ConfigError, match=f"127.0.0.1:{taken}.*--metrics-port"):
        ports.metrics_port(taken)


def test_ports_of_which_two_are_the_same():
    ports.check_distinct({"--port": 8000, "--grpc-port": None, "--metrics-port": 9464})
    with pytest.raises(ConfigError, match="--port and --metrics-port are both 8000: give one"):
        ports.check_distinct({"--port": 8000, "--grpc-port": None, "--metrics-port": 8000})
