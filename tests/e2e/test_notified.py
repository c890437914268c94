"""A service as systemd and a Prometheus elsewhere have it: says that it is ready, shows metrics.

``make test`` sends the same notices in tests/unit/launch/test_supervisor.py.
"""

import signal
import socket
from contextlib import suppress

import httpx
import pytest
from psutil import CONN_LISTEN, net_connections

from app.telemetry.metric_table import PROCESS_MEMORY
from tests.support.exposed_metrics import exposed
from tests.support.services.live_service import READY_WITHIN_S
from tests.support.services.processes import EVENTUALLY_S, descendants, wait_until
from tests.support.services.stopping import leaving_nothing

pytestmark = pytest.mark.slow

ELSEWHERE = "127.0.0.2"


KEY = "k" * 32


def get(url: str, key: str = KEY) -> httpx.Response:
    return httpx.get(url, timeout=60, headers={"authorization": f"Bearer {key}"})


def is_shown(port: int, path: str) -> bool:
    """Whether everybody on this machine may read it."""
    with suppress(httpx.HTTPError):
        return httpx.get(f"http://127.0.0.1:{port}{path}", timeout=2).status_code == 200
    return False


def test_ready_and_stopping_are_told_and_the_metrics_are_elsewhere(
    start_service, free_port, tmp_path, monkeypatch
):
    port, address = free_port(), str(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    monkeypatch.setenv("WATCHDOG_USEC", "4000000")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.settimeout(READY_WITHIN_S)
        systemd.bind(address)
        (key_file := tmp_path / "key").write_text(KEY)
        key_file.chmod(0o600)
        options = ("--metrics-host", ELSEWHERE, "--metrics-port", str(port))
        key = ("--metrics-key-file", str(key_file))
        service = start_service(*options, *key, is_awaited=False)
        assert systemd.recv(100) == b"READY=1", service.log.read_text()
        assert [systemd.recv(100) for _ in range(3)] == [b"STATUS=ready", *2 * [b"WATCHDOG=1"]]
        assert httpx.get(f"{service.url}/readyz", timeout=60).status_code == 200
        url = f"http://{ELSEWHERE}:{port}/metrics"
        assert f"metrics: {url}\n" in service.log.read_text()
        name = exposed(PROCESS_MEMORY)[0]
        wait_until(lambda: name in get(url).text, EVENTUALLY_S, "no metrics")
        # Other users of this machine reach no port, of Ray's agent or HAProxy, that shows figures.
        family = {service.process.pid, *(p.pid for p in descendants(service.process.pid))}
        ours = [c for c in net_connections("tcp") if c.pid in family and c.status == CONN_LISTEN]
        assert port in (bound := [c.laddr.port for c in ours])
        assert not [p for p in bound if is_shown(p, "/metrics") or is_shown(p, "/stats")]
        with leaving_nothing(service):
            service.send(signal.SIGTERM, is_for_all=True)  # as systemd does
            told = list(iter(lambda: systemd.recv(100), b"STOPPING=1"))
            assert set(told) <= {b"WATCHDOG=1"}
