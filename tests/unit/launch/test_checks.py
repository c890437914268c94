"""The port of /metrics: the usual one, or another; one that was asked for, or none."""

import socket
import subprocess
import sys
from subprocess import PIPE

import pytest

from app.errors import ConfigError
from app.launch import checks


@pytest.fixture
def taken():
    with socket.socket() as owner:
        owner.bind(("127.0.0.1", 0))
        owner.listen()
        yield owner.getsockname()[1]


def test_the_usual_port(monkeypatch):
    usual = checks.free_port()
    monkeypatch.setattr(checks, "METRICS_PORT", usual)
    assert checks.metrics_port(None) == usual


def test_another_one_if_a_second_service_has_it(monkeypatch, taken):
    monkeypatch.setattr(checks, "METRICS_PORT", taken)
    assert checks.metrics_port(None) != taken


def test_another_one_if_the_service_itself_will_have_it(monkeypatch):
    usual = checks.free_port()
    monkeypatch.setattr(checks, "METRICS_PORT", usual)
    assert checks.metrics_port(None, (8000, usual)) != usual
    assert checks.metrics_port(None, (8000, None)) == usual


def test_another_one_if_a_second_service_is_about_to_take_it(monkeypatch):
    """Ray listens seconds later; until then nobody does, and both would find the port free."""
    usual = checks.free_port()
    monkeypatch.setattr(checks, "METRICS_PORT", usual)
    code = (
        "import sys; from app.launch import checks; checks.METRICS_PORT = int(sys.argv[1])\n"
        "print(checks.metrics_port(None), flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(usual)]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert int(other.stdout.readline()) == usual
        assert checks.metrics_port(None) != usual
        assert checks.metrics_port(usual) == usual  # asked for: it is tried
        other.stdin.close()
    assert checks.metrics_port(None) == usual  # the other has ended


def test_one_that_was_asked_for_and_is_taken_is_refused(taken):
    with pytest.raises(ConfigError, match=f"127.0.0.1:{taken}.*--metrics-port"):
        checks.metrics_port(taken)


@pytest.mark.parametrize(
    ("option", "advice"), [("--port", "--host"), ("--metrics-port", "--metrics-host")]
)
@pytest.mark.parametrize("host", ["300.1.1.1", "nohost.invalid", "192.0.2.1"])
def test_an_address_of_another_machine_is_no_port_in_use(host, option, advice):
    with pytest.raises(ConfigError) as raised:
        checks.check_port(host, 20_000, option)
    message = raised.value.message
    assert message.startswith(f"cannot listen on {host}:20000: ")
    assert message.endswith(f"; give an address of this machine with {advice}")


def test_ports_of_which_two_are_the_same():
    checks.check_distinct({"--port": 8000, "--grpc-port": None, "--metrics-port": 9464})
    with pytest.raises(ConfigError, match="--port and --metrics-port are both 8000: give one"):
        checks.check_distinct({"--port": 8000, "--grpc-port": None, "--metrics-port": 8000})
