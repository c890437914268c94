"""A service whose Gateway or HAProxy is killed or stopped, by the kill table of docs/faults.md.

Clients keep their connections, but where a test says else. The rules alone, with more sizes:
tests/integration/test_haproxy_deaths.py.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.support.services.live_service import Service, drawn_photo
from tests.support.services.processes import EVENTUALLY_S, descendants, replicas, title, wait_until

pytestmark = pytest.mark.slow
NUM_CLIENTS, NUM_AFTER = 6, 10
HANGS_S, LATE_S = 10.5, 5  # a service's time limit, and what a busy machine adds
AWAY_S = 15  # HAProxy, at most: 2.5 s where nothing else runs, and 23 s before it was looked at
SMALL, LARGE = drawn_photo(width=256, height=256), drawn_photo(width=2000, height=1500)
Answers = list[httpx.Response | str]  # or the error's name


@pytest.fixture(scope="module")
def service(start_process) -> Iterator[Service]:
    running = start_process()
    running.wait_ready()
    yield running
    running.stop()


def during(
    service: Service, photo: bytes, strike: Callable[[], None], *, is_kept: bool = True
) -> Answers:
    """Strike while clients ask; return what they get until each has had ten right answers more."""
    answers: Answers = []
    limits = httpx.Limits(max_keepalive_connections=None if is_kept else 0)
    struck = threading.Event()

    def ask() -> None:
        num_right, deadline = 0, time.monotonic() + EVENTUALLY_S
        with httpx.Client(
            base_url=service.url, trust_env=False, timeout=EVENTUALLY_S, limits=limits
        ) as client:
            while num_right < NUM_AFTER and time.monotonic() < deadline:
                try:
                    answer = client.post("/v1/classify", content=photo)
                except httpx.HTTPError as error:
                    answers.append(type(error).__name__)
                    time.sleep(0.05)  # a client that is refused asks again a little later
                    continue
                answers.append(answer)
                num_right += answer.is_success and struck.is_set()

    clients = [threading.Thread(target=ask) for _ in range(NUM_CLIENTS)]
    for client in clients:
        client.start()
    wait_until(lambda: len(answers) >= 5 * NUM_CLIENTS, EVENTUALLY_S, "clients have connections")
    strike()
    struck.set()
    for client in clients:
        client.join()
    return answers


def errors(answers: Answers) -> set[str]:
    return {answer for answer in answers if isinstance(answer, str)}


def refusals(answers: Answers) -> set[tuple[int, str]]:
    """Return status and code of what is not right, all of which name a time to try again at."""
    wrong = [a for a in answers if isinstance(a, httpx.Response) and not a.is_success]
    assert all("retry-after" in answer.headers for answer in wrong)
    return {(answer.status_code, answer.json()["error"]["code"]) for answer in wrong}


def kill_gateway(service: Service, number: signal.Signals = signal.SIGKILL) -> None:
    os.kill(replicas(service.process.pid)["Gateway"], number)


@pytest.mark.parametrize("is_kept", [True, False], ids=["kept connections", "new connections"])
def test_no_small_photo_is_lost_when_the_gateway_is_killed(service, is_kept):
    answers = during(service, SMALL, lambda: kill_gateway(service), is_kept=is_kept)
    assert not errors(answers)
    assert refusals(answers) <= {(504, "deadline")}  # where a busy machine takes ten seconds for it


def test_a_large_photo_has_an_answer_when_the_gateway_is_killed(service):
    answers = during(service, LARGE, lambda: kill_gateway(service))
    assert not errors(answers)
    assert refusals(answers) <= {(502, "broken_off"), (503, "not_ready"), (504, "deadline")}


def test_a_gateway_that_hangs_is_replaced_and_its_requests_are_answered_in_time(service):
    stopped = replicas(service.process.pid)["Gateway"]
    answers = during(service, SMALL, lambda: kill_gateway(service, signal.SIGSTOP))
    assert not errors(answers)
    assert refusals(answers) <= {(503, "not_ready"), (504, "deadline")}
    taken_s = [a.elapsed.total_seconds() for a in answers if isinstance(a, httpx.Response)]
    assert max(taken_s) < HANGS_S + LATE_S
    gateway = "ray::ServeReplica:tandem:Gateway"  # the stopped one may be there for 12 s more
    there = {p.pid for p in descendants(service.process.pid) if gateway in title(p)}
    assert there - {stopped}


@pytest.mark.parametrize("name", ["haproxy -db", "ray::HAProxyManager"])
def test_without_haproxy_no_client_is_told_that_the_path_is_wrong(service, name):
    # After a reload there may be two for a while.
    those = [p for p in descendants(service.process.pid) if name in title(p)]
    struck = time.monotonic()
    answers = during(service, SMALL, max(those, key=lambda p: p.create_time()).kill)
    assert refusals(answers) <= {(503, "not_ready")}
    assert time.monotonic() - struck < AWAY_S


@pytest.mark.parametrize("name", ["ray::ServeController", "ray::ProxyActor"])
def test_without_the_controller_or_a_proxy_no_request_is_lost(service, name):
    (process,) = [p for p in descendants(service.process.pid) if name in title(p)]
    answers = during(service, SMALL, process.kill)
    assert not errors(answers)
    assert not refusals(answers)
    wait_until(lambda: is_replaced(service, name, process.pid), EVENTUALLY_S, f"another {name}")


def is_replaced(service: Service, name: str, pid: int) -> bool:
    return bool({p.pid for p in descendants(service.process.pid) if name in title(p)} - {pid})
