"""``when_full: fast`` on a real service: a crowd is answered by the fast plan, then by all again.

Its rule is tested in virtual time: tests/unit/queueing/test_overload.py.
"""

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.support.services.processes import wait_until

pytestmark = pytest.mark.slow
NUM_PLACES, NUM_CLIENTS = 32, 28


def test_a_crowd_is_answered_by_the_fast_plan(start_service, photo, photo_label):
    places = {"max_concurrent_requests": NUM_PLACES, "target_wait_ms": None}
    service = start_service(args={"when_full": "fast", **places})

    def answer(client: httpx.Client, plan: str = "") -> dict:
        asked = client.post("/v1/classify", content=photo, params={"plan": plan} if plan else {})
        assert asked.status_code == 200, asked.text
        return asked.json()

    with httpx.Client(base_url=service.url, timeout=60) as client:
        assert answer(client)["plan"] == "full"
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            wanted = ["full" if number % 9 == 8 else "" for number in range(8 * NUM_CLIENTS)]
            answers = list(pool.map(lambda plan: answer(client, plan), wanted))
        hurried = [one for one in answers if one["plan"] == "fast"]
        assert len(hurried) > len(answers) / 2
        assert {one["reason"] for one in hurried} == {"load"}
        assert {one["plan"] for one, plan in zip(answers, wanted, strict=True) if plan} == {"full"}
        assert {one["predictions"][0]["label"] for one in answers} == {photo_label}
        wait_until(lambda: answer(client)["plan"] == "full", 10, "the plan full after the crowd")
        assert "reason" not in answer(client)
