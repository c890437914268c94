"""What a service's processes are to it: with one killed it goes on, or ends and leaves nothing.

The same port serves again each time: what is left would hold it.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

import httpx
import psutil
import pytest

from tests.support.services.live_service import Service, label_at
from tests.support.services.processes import (
    EVENTUALLY_S,
    descendants,
    fork_server,
    listening,
    raylet,
    run_folder,
    still_listening,
    still_running,
    title,
    wait_until,
)

pytestmark = pytest.mark.slow

ENDED_WITHIN_S = 60  # 1.5 s where nothing else runs; Ray itself notices after 61 to 85 s
NUM_CLIENTS, NUM_BEFORE = 3, 5


@pytest.fixture(scope="module")
def port(free_port) -> int:
    return free_port()


def named(service: Service, name: str) -> psutil.Process:
    return next(p for p in descendants(service.process.pid) if name in title(p))


@contextmanager
def under_way(service: Service, photo: bytes, label: str) -> Iterator[None]:
    """Let clients ask during the block, after five answers each; what is accepted is answered."""
    asked: list[tuple[float, str]] = []  # when, and the answer or the error

    def ask() -> None:
        answer = label
        while answer == label:
            sent = time.monotonic()
            try:
                answer = label_at(service.url, photo)
            except httpx.HTTPError as error:
                answer = type(error).__name__
            asked.append((sent, answer))

    clients = [threading.Thread(target=ask) for _ in range(NUM_CLIENTS)]
    for client in clients:
        client.start()
    wait_until(lambda: len(asked) >= NUM_CLIENTS * NUM_BEFORE, EVENTUALLY_S, "clients are answered")
    struck = time.monotonic()
    yield
    for client in clients:
        client.join()
    before = {answer for sent, answer in asked if sent < struck}
    assert before - {"ConnectError"} == {label}  # some open their connection after it


NEEDED = {
    "the fork server": lambda service: fork_server(service.process.pid),
    "Ray's DashboardAgent": lambda service: named(service, "ray::DashboardAgent"),
    "Ray's raylet": lambda service: raylet(service.process.pid),
    "Ray's gcs_server": lambda service: named(service, "/gcs/gcs_server"),
}


@pytest.mark.parametrize("name", NEEDED)
def test_without_a_process_that_nobody_replaces_it_ends_and_the_next_one_starts(
    start_service, port, photo, photo_label, name
):
    service = start_service("--log-format", "json", port=port)
    assert service.label(photo) == photo_label
    family, folder = descendants(service.process.pid), run_folder(service.process.pid)
    ports = listening(family) | {port}
    process = NEEDED[name](service)
    with under_way(service, photo, photo_label):
        process.kill()
    assert service.process.wait(ENDED_WITHIN_S) == 1, service.log.read_text()
    last = json.loads(service.log.read_text().splitlines()[-1])
    how = "ended" if "Dashboard" in name else "was ended by SIGKILL"
    assert last["levelname"] == "CRITICAL"
    line = f"tandem serve ends: {name}, process {process.pid}, {how}"
    assert last["message"].startswith(line)
    assert still_running(family) == []
    assert still_listening(ports, folder) == set()
    assert {path.name for path in folder.iterdir()} == {"logs", "run.lock"}


def test_what_serve_replaces_is_told_and_a_service_that_hangs_is_ended(
    start_service, port, photo, photo_label
):
    service = start_service("--log-format", "json", port=port)
    named(service, "ray::HAProxyManager").kill()
    for line in ("ray::HAProxyManager of Ray, process", "HAProxy, process"):
        wait_until(partial(is_told, service, line), EVENTUALLY_S, line)
    wait_until(lambda: is_served(service, photo, photo_label), EVENTUALLY_S, "it answers again")
    assert service.process.poll() is None

    manager, haproxy = named(service, "ray::HAProxyManager"), named(service, "haproxy -db")
    for process in (named(service, "ServeController"), manager, haproxy):
        process.suspend()  # so that nobody looks, and nothing is answered
    family = descendants(service.process.pid)
    assert service.process.wait(EVENTUALLY_S) == 1
    assert "/readyz has failed for 60 s (ReadTimeout)" in service.log.read_text()
    assert still_running(family) == []


def is_told(service: Service, line: str) -> bool:
    return line in service.log.read_text()


def is_served(service: Service, photo: bytes, label: str) -> bool:
    with suppress(httpx.HTTPError):
        return service.label(photo) == label
    return False


def test_a_killed_command_leaves_nothing(start_service, port):
    service = start_service(port=port)
    family = descendants(service.process.pid)
    os.kill(service.process.pid, signal.SIGKILL)
    assert still_running(family, 60) == []
