"""A set that is unloaded and loaded by name at one of two Gateways, and at one that comes later.

In the fast tier: tests/unit/serve/test_sets.py.
"""

from collections import Counter
from collections.abc import Iterator

import httpx
import pytest

from tests.support.services.live_service import Service
from tests.support.services.processes import descendants, serve_logs, title, wait_until
from tests.support.several_sets import SECOND, write_two_sets
from tests.support.tiny_networks import picture

pytestmark = pytest.mark.slow
WITHIN_S = 90
NUM_ASKED = 40  # a Gateway of two is left out by chance once in 2^39


@pytest.fixture(scope="module")
def service(start_service, tmp_path_factory) -> Service:
    sets = ",".join(write_two_sets(tmp_path_factory.mktemp("sets")))
    return start_service("--model-set", sets, gateways=2)


@pytest.fixture
def client(service) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.url, timeout=120, trust_env=False) as client:
        yield client


def statuses(client: httpx.Client) -> Counter[int]:
    """Ask for the second set on new connections, which Gateways take in turns."""
    counts: Counter[int] = Counter()
    for _ in range(NUM_ASKED):
        counts[classified(client).status_code] += 1
    return counts


def classified(client: httpx.Client) -> httpx.Response:
    query, headers = {"model_set": SECOND}, {"connection": "close"}
    return client.post("/v1/classify", params=query, content=picture("red"), headers=headers)


def changed(client: httpx.Client, how: str) -> None:
    answer = client.post(f"/v2/repository/models/{SECOND}/{how}")
    assert answer.status_code == 200, answer.text


def gateways(service: Service) -> set[int]:
    processes = descendants(service.process.pid)
    return {p.pid for p in processes if title(p).startswith("ray::ServeReplica:tandem:Gateway")}


def test_all_gateways_follow_and_so_does_one_that_is_replaced(service, client):
    assert statuses(client) == {200: NUM_ASKED}
    changed(client, "unload")
    assert statuses(client) == {404: NUM_ASKED}
    before = gateways(service)
    assert len(before) == 2
    (first, *_) = (p for p in descendants(service.process.pid) if p.pid in before)
    first.kill()
    wait_until(lambda: num_unloaded(service) == 3, WITHIN_S, "another Gateway to follow")
    wait_until(lambda: len(gateways(service) - {first.pid}) == 2, WITHIN_S, "two Gateways")
    assert statuses(client) == {404: NUM_ASKED}
    changed(client, "load")
    assert statuses(client) == {200: NUM_ASKED}


def num_unloaded(service: Service) -> int:
    """Return how many Gateways have unloaded the second set, by their logs."""
    logs = serve_logs(service.process.pid).glob("*Gateway*.log")
    return sum(f"model set {SECOND}, version" in log.read_text() for log in logs)
