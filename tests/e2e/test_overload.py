"""More than the service can carry: who is answered, and who is refused.

That a client which goes away stops costing is in traced/test_client_gone.py.
"""

import asyncio
import re
from collections import Counter

import httpx

from app.metrics.table import OF_SERVE
from tests.support.services.live_service import Service
from tests.support.services.processes import EVENTUALLY_S, wait_until

LIMIT = 128  # max_concurrent_requests
HURRIED_S = "0.008"  # less than what waits takes on any CPU


def classify(service: Service, photo: bytes, **headers: str) -> httpx.Response:
    url = f"{service.url}/v1/classify?top_k=1"
    return httpx.post(url, content=photo, headers=headers, timeout=60)


async def all_at_once(
    service: Service, photo: bytes, num: int, **headers: str
) -> list[httpx.Response]:
    limits = httpx.Limits(max_connections=num)
    async with httpx.AsyncClient(timeout=60, limits=limits, trust_env=False) as client:
        url = f"{service.url}/v1/classify?top_k=1"
        sent = (client.post(url, content=photo, headers=headers) for _ in range(num))
        return await asyncio.gather(*sent)


def counted(service: Service, metric: str, *labels: str) -> float:
    """Return a metric of the service, the sum of all that have these labels (``name="value"``)."""
    address = re.search(r"metrics: http://(\S+)/metrics", service.log.read_text())
    assert address
    text = httpx.get(f"http://{address[1]}/metrics", timeout=10).text
    found = re.findall(rf"^{metric}(?:_total)?\{{(.*)\}} (\S+)$", text, re.MULTILINE)
    return sum(float(value) for had, value in found if all(label in had for label in labels))


def test_too_much_is_refused_early_counted_and_the_rest_is_answered(
    service: Service, photo: bytes, photo_label: str
) -> None:
    def refused() -> float:
        return counted(service, OF_SERVE.removesuffix("_total"), 'status_code="429"')

    before = refused()
    answers = asyncio.run(all_at_once(service, photo, 3 * LIMIT))
    told = Counter(answer.status_code for answer in answers)
    assert set(told) == {200, 429}
    assert told[200] >= LIMIT / 2
    for answer in answers:
        if answer.status_code == 200:
            assert answer.json()["predictions"][0]["label"] == photo_label
        else:
            assert answer.json()["error"]["code"] == "overloaded"
            assert int(answer.headers["retry-after"]) >= 1
    assert classify(service, photo).status_code == 200
    # HAProxy tells Serve in datagrams, of which a burst loses some; the Gateway sees 1 of 64.
    wait_until(lambda: refused() - before > told[429] / 2, EVENTUALLY_S, f"{told[429]} refusals")


def test_who_cannot_be_answered_in_time_is_told_so(service: Service, photo: bytes) -> None:
    async def both() -> tuple[list[httpx.Response], list[httpx.Response]]:
        patient = asyncio.create_task(all_at_once(service, photo, LIMIT // 2))
        await asyncio.sleep(0.1)  # the first of the patient ones wait
        hurried = all_at_once(service, photo, 20, **{"x-request-timeout-seconds": HURRIED_S})
        return await hurried, await patient

    hurried, patient = asyncio.run(both())
    assert {answer.status_code for answer in patient} == {200}
    assert {answer.status_code for answer in hurried} <= {429, 504}
    assert {a.json()["error"]["code"] for a in hurried} <= {"overloaded", "deadline"}
