"""Two services on one machine, of which the second loses its Gateway, and is stopped under load.

In the fast tier: other ways to stop a service, where the shared ones end (tests/e2e/conftest.py),
and the ports of two services (tests/unit/launch/test_checks.py).
"""

import asyncio
import os
import signal

import httpx
import psutil
import pytest

from tests.support.services import processes
from tests.support.services.stopping import leaving_nothing

pytestmark = pytest.mark.slow
NUM = 40
NUM_SIGNALS, SIGNAL_EVERY_S = 5, 0.2  # as fast as fingers are


@pytest.fixture(scope="module")
def second(service, start_process):
    """Another service beside the one that the tests share, started alike."""
    started = start_process()
    try:
        started.wait_ready()
        yield started
    finally:
        started.stop()


def test_two_services_at_once(service, second, photo, photo_label):
    # Serve's proxies set SO_REUSEPORT: a port of both would answer with either's networks.
    assert not set.intersection(
        *[processes.listening(processes.descendants(one.process.pid)) for one in (service, second)]
    )
    assert service.label(photo) == second.label(photo) == photo_label


def test_without_a_collector_nothing_is_traced(second, photo):
    traceparent = f"00-{'a' * 32}-{'b' * 16}-01"
    answer = httpx.post(
        f"{second.url}/v1/classify", content=photo, headers={"traceparent": traceparent}, timeout=60
    )
    assert answer.status_code == 200
    assert "x-trace-id" not in answer.headers
    assert answer.json()["timings_ms"]["stages"]  # the page's timeline is made of these


def test_a_gateway_that_dies_is_replaced(second, photo):
    """By another fork. What the server and its clients do is in tests/unit/launch/test_forks.py."""
    pid = second.process.pid
    gateway = processes.replicas(pid)["Gateway"]
    os.kill(gateway, signal.SIGKILL)

    def answers_again() -> bool:
        if processes.replicas(pid).get("Gateway", gateway) == gateway:
            return False
        with httpx.Client(base_url=second.url, timeout=60) as client:
            return client.post("/v1/classify", content=photo).status_code == 200

    processes.wait_until(answers_again, processes.EVENTUALLY_S, "another Gateway")
    assert psutil.Process(processes.replicas(pid)["Gateway"]).parent() == processes.fork_server(pid)


def test_what_is_under_way_is_answered_and_nothing_is_left(service, second, photo, photo_label):
    async def ask_and_stop() -> list[httpx.Response | BaseException]:
        async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
            url = f"{second.url}/v1/classify"
            sent = [asyncio.create_task(client.post(url, content=photo)) for _ in range(NUM)]
            await asyncio.wait(sent, return_when=asyncio.FIRST_COMPLETED)
            for _ in range(NUM_SIGNALS):
                second.process.send_signal(signal.SIGINT)
                await asyncio.sleep(SIGNAL_EVERY_S)
            return await asyncio.gather(*sent, return_exceptions=True)

    with leaving_nothing(second):
        answers = asyncio.run(ask_and_stop())
        told = [a.status_code if isinstance(a, httpx.Response) else repr(a) for a in answers]
        assert told == [200] * NUM
    assert service.label(photo) == photo_label
