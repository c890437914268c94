"""A service as systemd and a Prometheus elsewhere have it: says that it is ready, shows metrics.

``make test`` sends the same notices in tests/unit/launch/test_serve.py.
"""

import signal
import socket

import httpx
import pytest

from app.telemetry.metric_table import PROCESS_MEMORY
from tests.support.exposed_metrics import exposed
from tests.support.services.live_service import READY_WITHIN_S
from tests.support.services.processes import EVENTUALLY_S, wait_until
from tests.support.services.stopping import leaving_nothing

pytestmark = pytest.mark.slow

ELSEWHERE = "127.0.0.2"


def test_ready_and_stopping_are_told_and_the_metrics_are_elsewhere(
    start_service, free_port, tmp_path, monkeypatch
):
    port, address = free_port(), str(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.settimeout(READY_WITHIN_S)
        systemd.bind(address)
        options = ("--metrics-host", ELSEWHERE, "--metrics-port", str(port))
        service = start_service(*options, is_awaited=False)
        assert systemd.recv(100) == b"READY=1", service.log.read_text()
        assert httpx.get(f"{service.url}/readyz", timeout=60).status_code == 200
        url = f"http://{ELSEWHERE}:{port}/metrics"
        assert f"metrics: {url}\n" in service.log.read_text()
        name = exposed(PROCESS_MEMORY)[0]
        wait_until(lambda: name in httpx.get(url, timeout=60).text, EVENTUALLY_S, "no metrics")
        with leaving_nothing(service):
            service.send(signal.SIGTERM, is_for_all=True)  # as systemd does
            assert systemd.recv(100) == b"STOPPING=1"
