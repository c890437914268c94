"""Ray's Python processes of a real service are forks, and one that dies is replaced by another."""

import contextlib
import os
import signal

import httpx
import psutil
import pytest

from app.launch.forks.running import SERVER_MODULE
from tests.support.services.live_service import Service, Start
from tests.support.services.processes import (
    EVENTUALLY_S,
    descendants,
    replicas,
    serve_logs,
    title,
    wait_until,
)

FORKED = ("Agent", "ProxyActor", "HAProxyManager", "ServeController", "ServeReplica")


def fork_server(service: Service) -> psutil.Process:
    return next(p for p in descendants(service.process.pid) if SERVER_MODULE in title(p))


def test_every_process_of_rays_is_a_fork(service: Service) -> None:
    processes = descendants(service.process.pid)
    of_ray = [p for p in processes if any(kind in title(p) for kind in FORKED)]
    assert len(of_ray) >= len(FORKED)
    assert {p.parent() for p in of_ray} == {fork_server(service)}
    assert "not forked" not in (serve_logs(service.process.pid).parent / "raylet.err").read_text()


def test_no_process_gives_way_to_other_programs(service: Service) -> None:
    """Ray's own default is nice 15 for its workers: a busy browser would starve them."""
    own = psutil.Process(service.process.pid).nice()
    levels = set()
    for process in descendants(service.process.pid):
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended while this looked
            levels.add(process.nice())
    assert levels == {own}


@pytest.mark.slow
def test_a_gateway_that_dies_is_replaced(start_service: Start, photo: bytes) -> None:
    """By another fork. What the server and its clients do is in tests/unit/launch/test_forks.py."""
    service = start_service()
    service.wait_ready()
    gateway = replicas(service.process.pid)["Gateway"]
    os.kill(gateway, signal.SIGKILL)

    def answers_again() -> bool:
        if replicas(service.process.pid).get("Gateway", gateway) == gateway:
            return False
        with httpx.Client(base_url=service.url, timeout=60) as client:
            return client.post("/v1/classify", content=photo).status_code == 200

    wait_until(answers_again, EVENTUALLY_S, "another Gateway")
    found = psutil.Process(replicas(service.process.pid)["Gateway"])
    assert found.parent() == fork_server(service)
