"""More than the service can carry: who is answered, and who is refused.

That a client which goes away stops costing is in test_client_gone.py.
"""

import asyncio
import contextlib
import json
import re
import time
from collections import Counter
from itertools import pairwise

import httpx
import pytest

from app.queueing.overload import MAX_BACKLOG_S
from app.telemetry.metric_table import PROCESS_CPU_MS, REFUSED_BEFORE, REQUESTS
from models.machine import available_cpus
from tests.support.services.processes import EVENTUALLY_S, wait_until

LIMIT = 128  # max_concurrent_requests
TIME_LIMIT_S = 10.0  # request_timeout_s
IN_BATCHES = 8 * available_cpus()  # batch_sizes
HURRIED_S = "0.008"  # less than what waits takes on any CPU
QUIET_S = 2 * MAX_BACKLOG_S  # nobody comes for this long: no overload, whatever the rate was


def classify(service, photo, **headers):
    url = f"{service.url}/v1/classify?top_k=1"
    return httpx.post(url, content=photo, headers=headers, timeout=60)


async def all_at_once(service, photo, num, **headers):
    limits = httpx.Limits(max_connections=num)
    async with httpx.AsyncClient(timeout=60, limits=limits, trust_env=False) as client:
        url = f"{service.url}/v1/classify?top_k=1"
        sent = (client.post(url, content=photo, headers=headers) for _ in range(num))
        return await asyncio.gather(*sent)


def counted(service, metric, *labels):
    """Return a metric of the service, the sum of all that have these labels (``name="value"``)."""
    text = httpx.get(service.metrics_url, timeout=10).text
    found = re.findall(rf"^{metric}(?:_total)?\{{(.*)\}} (\S+)$", text, re.MULTILINE)
    return sum(float(value) for had, value in found if all(label in had for label in labels))


def test_too_much_is_refused_early_counted_and_the_rest_is_answered(service, photo, photo_label):
    def refused() -> float:
        of_gateway = counted(service, f"ray_{REQUESTS.name}", 'status="429"')
        return of_gateway + counted(service, f"ray_{REFUSED_BEFORE.name}")

    before = refused()
    answers = asyncio.run(_on_bare_connections(service, photo, 3 * LIMIT))
    told = Counter(status for status, *_ in answers)
    assert {200, 429} <= set(told) <= {200, 429, 504}
    assert told[200] + told[504] >= LIMIT / 2
    for status, head, body, took_s in answers:
        if status == 200:
            assert json.loads(body)["predictions"][0]["label"] == photo_label
        elif status == 504:  # let in, and slow on a machine that others keep busy
            assert took_s > 0.9 * TIME_LIMIT_S
        else:
            assert json.loads(body)["error"]["code"] == "overloaded"
            assert re.search(rb"\r\nretry-after: [1-9]", head, re.IGNORECASE)
    assert classify(service, photo).status_code == 200
    # HAProxy's threads count without a lock: two at the same time may count as one.
    wait_until(lambda: refused() - before > 0.9 * told[429], EVENTUALLY_S, f"{told[429]} refusals")
    assert refused() - before <= told[429]


@pytest.mark.slow  # make test: unit/launch/test_forks.py
def test_a_figure_is_a_few_seconds_old(service):
    """The queues of a load that is over are soon shown as empty; Ray's own pace is 10 s."""

    def figure() -> str:
        text = httpx.get(service.metrics_url, timeout=10).text
        of_a_process = re.search(rf"^ray_{PROCESS_CPU_MS.name}_total{{.*", text, re.MULTILINE)
        return of_a_process[0] if of_a_process else ""

    seen = [(0.0, figure())]
    while len(seen) < 4:
        time.sleep(0.1)
        if (now := figure()) != seen[-1][1]:
            seen.append((time.monotonic(), now))
    assert min(later - before for (before, _), (later, _) in pairwise(seen[1:])) < 7


@pytest.mark.slow  # make test: the first test here; unit/queueing/test_concurrency_limit.py
@pytest.mark.skipif(IN_BATCHES >= LIMIT, reason="the batches of all cores fill all places")
def test_who_is_let_in_does_not_wait_behind_all_the_places(service, photo):
    """While more come than are answered HAProxy lets fewer in; then all places are there again."""
    assert IN_BATCHES <= asyncio.run(_fewest_places(service, photo)) < LIMIT

    def all_places() -> bool:
        time.sleep(1)  # as Retry-After says: who comes at once keeps the overload going
        answers = asyncio.run(all_at_once(service, photo, LIMIT // 4))
        return {answer.status_code for answer in answers} == {200}

    wait_until(all_places, EVENTUALLY_S, "all places after the overload")
    time.sleep(QUIET_S)  # on a fast CPU so few fit into what overload leaves, too
    answers = asyncio.run(all_at_once(service, photo, LIMIT // 2))
    assert {answer.status_code for answer in answers} == {200}


def _request(photo):
    """Return the bytes of a request, for a bare connection.

    A client library needs so much CPU time that fewer requests than there are places come at once.
    """
    head = f"POST /v1/classify?top_k=1 HTTP/1.1\r\nHost: x\r\nContent-Length: {len(photo)}\r\n\r\n"
    return head.encode() + photo


async def _on_bare_connections(service, photo, num):
    """Send requests, each on its own connection; return status, head, body and seconds of each."""
    opening = (asyncio.open_connection("127.0.0.1", service.port) for _ in range(num))
    connections, request = await asyncio.gather(*opening), _request(photo)
    started = time.monotonic()

    async def answered(reader, writer):
        answer = await _answer(reader)
        writer.close()
        assert answer, "a connection was closed without an answer"
        return *answer, time.monotonic() - started

    for _, writer in connections:
        writer.write(request)
    return await asyncio.gather(*(answered(*connection) for connection in connections))


async def _fewest_places(service, photo):
    """Send more than can be answered until a refusal tells of fewer places than the limit."""
    request, told = _request(photo), LIMIT

    async def impatient() -> None:
        nonlocal told
        while told == LIMIT:
            reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
            with contextlib.suppress(ConnectionError):  # refused while it still sends
                writer.write(request)
                await writer.drain()
            while told == LIMIT and (answer := await _answer(reader)) is not None:
                status, _, body = answer
                if status == 429:
                    found = re.search(rb"(\d+) requests are under way for", body)
                    told = min(told, int(found[1]) if found else LIMIT)
                    await asyncio.sleep(0.05)  # a refusal takes a millisecond
                with contextlib.suppress(ConnectionError):
                    writer.write(request)
                    await writer.drain()
            writer.transport.abort()

    async with asyncio.timeout(EVENTUALLY_S):
        await asyncio.gather(*(impatient() for _ in range(2 * LIMIT)))
    return told


async def _answer(reader: asyncio.StreamReader) -> tuple[int, bytes, bytes] | None:
    """Return status, head and body of the next answer; None if the connection was closed."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        body = await reader.readexactly(int(length[1]) if length else 0)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return int(head.split(b" ", 2)[1]), head, body


def test_who_cannot_be_answered_in_time_is_told_so(service, photo):
    async def both() -> tuple[list[httpx.Response], list[httpx.Response]]:
        patient = asyncio.create_task(all_at_once(service, photo, LIMIT // 2))
        await asyncio.sleep(0.1)  # the first of the patient ones wait
        hurried = all_at_once(service, photo, 20, **{"x-request-timeout-seconds": HURRIED_S})
        return await hurried, await patient

    time.sleep(QUIET_S)  # the tests before this one made an overload
    hurried, patient = asyncio.run(both())
    assert {answer.status_code for answer in patient} == {200}
    told = {(answer.status_code, answer.json()["error"]["code"]) for answer in hurried}
    # The last: on a busy machine the time is over before the photo is there.
    assert told <= {(429, "overloaded"), (504, "deadline"), (408, "slow_body")}
