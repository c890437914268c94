"""Input that nobody should send: each gets its answer, and none of it harms anybody else."""

import itertools
import re
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.services.hostile import CORPUS, Hostile, hang_up, send
from tests.support.services.processes import memory_bytes, replicas

NUM_FEW, NUM_REQUESTS = 100, 1000
WITHIN_S = 90
NUM_CALLERS = 6  # three times the cores: bad and good requests are in the service at one time
NUM_WARM_UPS = 2  # whole floods: bodies of 19 MB must have met, or the arenas still widen
HEAVY_EVERY = 2  # rounds: some 50 bodies of 19 or 40 MB in all
# Against the highest of the warm-ups; measured five times: -28 to +6 MB of 2.2 GB. Bodies of 19 MB
# in flight at one time widen the allocators' arenas as chance has it: three of them are allowed.
# One large body in ten that is kept (95 MB) would show, and 60 kB a request; a smaller leak not.
MAX_GROWTH_BYTES = 60 * 10**6


def check(hostile, answer):
    assert answer.status_code == hostile.status, answer.text
    body = answer.json()
    if hostile.status == 200:
        assert len(body["predictions"]) == 5
        return
    assert body["error"]["code"] == hostile.code
    assert re.search(hostile.says, body["error"]["message"], re.IGNORECASE | re.DOTALL), body
    assert body["error"]["request_id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize("hostile", CORPUS, ids=lambda hostile: hostile.name)
def test_it_gets_its_status_and_is_told_what_to_do(hostile, client):
    check(hostile, send(client, hostile))


def test_a_client_that_hangs_up_half_way(client, service, photo, photo_label):
    before = replicas(service.process.pid)
    for _ in range(20):
        hang_up(service.url)
    answer = client.post("/v1/classify", content=photo)
    assert answer.json()["predictions"][0]["label"] == photo_label
    assert replicas(service.process.pid) == before


def attack(client, url, hostile):
    """Send one request of the flood; None hangs up half-way."""
    if hostile is None:
        hang_up(url)
    else:
        check(hostile, send(client, hostile))


def flood(num: int) -> list[Hostile | None]:
    """Return ``num`` of the corpus in turn, the heavy ones in every second round."""
    rounds = itertools.count()
    endless = (
        hostile
        for number in rounds
        for hostile in (None, *CORPUS)
        if hostile is None or not hostile.is_heavy or number % HEAVY_EVERY == 0
    )
    return list(itertools.islice(endless, num))


def label_of(client, photo):
    answer = client.post("/v1/classify", content=photo)
    assert answer.status_code == 200, answer.text
    return answer.json()["predictions"][0]["label"]


def run_together(client, url, requests, photo):
    """Send them all, and a good request beside every fifth; return the good ones' labels."""
    with ThreadPoolExecutor(NUM_CALLERS) as callers:
        jobs, good = [], []
        for number, hostile in enumerate(requests):
            jobs.append(callers.submit(attack, client, url, hostile))
            if number % 5 == 0:
                good.append(callers.submit(label_of, client, photo))
        for job in jobs:
            job.result()
        return Counter(job.result() for job in good)


def test_they_harm_nobody_beside_them(client, service, photo, photo_label):
    pids = replicas(service.process.pid)
    assert pids, "no replica was found"
    assert run_together(client, service.url, flood(NUM_FEW), photo) == {photo_label: NUM_FEW // 5}
    assert replicas(service.process.pid) == pids, "a replica died"


@pytest.mark.slow
def test_a_thousand_of_them_change_nothing(client, service, photo, photo_label):
    """Nor the memory. In the fast tier: a hundred of them, and each of them alone (above)."""
    pid, memory = service.process.pid, 0
    for _ in range(NUM_WARM_UPS):
        run_together(client, service.url, flood(NUM_REQUESTS), photo)
        memory = max(memory, memory_bytes(pid))
    pids = replicas(pid)
    assert pids, "no replica was found"

    started = time.monotonic()
    labels = run_together(client, service.url, flood(NUM_REQUESTS), photo)
    took = time.monotonic() - started

    assert labels == {photo_label: NUM_REQUESTS // 5}
    assert replicas(pid) == pids, "a replica died"
    growth = memory_bytes(pid) - memory
    print(f"{took:.1f} s; {memory / 1e6:.0f} MB before, {growth / 1e6:+.0f} MB after")
    assert growth < MAX_GROWTH_BYTES
    assert took < WITHIN_S
