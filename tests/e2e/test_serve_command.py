"""``tandem serve``: what cannot work is refused before anything starts; a start can be interrupted.

Refusals of every kind are in tests/unit/cli/test_serve.py. How a running service stops is
tested where the shared ones end (conftest.py) and in test_stopping.py.
"""

import signal
import socket
import time

import psutil
import pytest

from tests.support.services.processes import EVENTUALLY_S, descendants, title, wait_until
from tests.support.services.stopping import stop_and_check


def refused(service, temp):
    """Wait for exit code 2; return what was said. A Ray would have left its logs in ``temp``."""
    runs = set(temp.iterdir())
    assert service.process.wait(EVENTUALLY_S) == 2, service.log.read_text()
    assert set(temp.iterdir()) <= runs, "Ray was started, and left its logs"
    said = service.log.read_text()
    assert said.startswith("tandem: ")
    assert "Traceback" not in said
    return said


def test_a_port_that_is_taken(start_service, temp):
    with socket.socket() as owner:
        owner.bind(("127.0.0.1", 0))
        owner.listen()
        port = owner.getsockname()[1]
        said = refused(start_service(port=port, is_awaited=False), temp)
    assert f"127.0.0.1:{port}" in said
    assert f"process {psutil.Process().pid}, {psutil.Process().name()}" in said
    assert "--port" in said


def is_there(name, service):
    return any(name in title(process) for process in descendants(service.process.pid))


@pytest.mark.slow  # make test stops a running service in test_stopping.py
@pytest.mark.parametrize("moment", ["ray::ServeController", "raylet"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_start_stops_all_of_it(start_service, moment, number):
    service, started = start_service(is_awaited=False), time.monotonic()
    wait_until(lambda: is_there(moment, service), 120, moment)
    assert "ready" not in service.log.read_text()
    # On a quiet machine it is 4 to 8 s old; what has begun to start then has to end first.
    stop_and_check(service, number, busy_s=4 * (time.monotonic() - started))
