"""The service's processes on this machine are those behind the port of its URL."""

import subprocess
from types import SimpleNamespace

import psutil
import pytest

from app.bench.process_tree import cpu_seconds, service_root

PIDS = {80: 11, 443: 12, 8000: 13}


class Process:
    """A service's process, which has no parents."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def parents(self) -> list["Process"]:
        return []

    def cmdline(self) -> list[str]:
        return ["/usr/bin/tandem", "serve"]


@pytest.mark.parametrize(
    ("url", "pid"),
    [
        ("http://127.0.0.1", 11),
        ("http://localhost/", 11),
        ("https://127.0.0.1", 12),
        ("http://127.0.0.1:8000", 13),
        ("http://[::1]:80/v1", 11),
        ("http://127.0.0.1:8001", None),
        ("http://shop.example", None),
    ],
)
def test_a_url_without_a_port_is_of_its_schemes(monkeypatch, url, pid):
    listening = [
        SimpleNamespace(laddr=SimpleNamespace(port=port), status=psutil.CONN_LISTEN, pid=pid)
        for port, pid in PIDS.items()
    ]
    monkeypatch.setattr(psutil, "net_connections", lambda _: listening)
    monkeypatch.setattr(psutil, "Process", Process)
    root = service_root(url)
    assert (root.pid if root else None) == pid


def test_a_service_that_has_ended_has_no_cpu_time() -> None:
    with subprocess.Popen(["sleep", "60"]) as service:
        root = psutil.Process(service.pid)
        assert list(cpu_seconds(root)) == ["Ray"]
        service.kill()
    assert cpu_seconds(root) == {}
