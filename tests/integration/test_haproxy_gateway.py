"""HAProxy, with all of Serve's configuration, before the HTTP interface in a real uvicorn.

What both answer to good and odd requests is tested with a whole service: tests/e2e/shipped.
"""

import asyncio
from collections.abc import Iterator
from contextlib import suppress

import httpx
import pytest

from app.launch.checks import HttpOptions
from app.settings import Settings
from tests.support.fakes import FakeService
from tests.support.gateway_behind_haproxy import gateway_of, haproxy_of
from tests.support.haproxy_process import OPTIONS
from tests.support.services.processes import EVENTUALLY_S, wait_until
from tests.support.slow_clients import KINDS, Cut, linger

HASTY_S = 1
NUM_SLOW_OF_A_KIND, NUM_GOOD = 2, 30


@pytest.fixture
def hasty_port(free_port, tmp_path) -> Iterator[int]:
    """HAProxy's port; a request begins within a second, and its body is there after another."""
    options = OPTIONS._replace(begin_within_s=HASTY_S)
    settings = Settings(max_body_bytes=2_000_000, request_timeout_s=HASTY_S)
    front, own = free_port(), (free_port(), free_port())

    def answers() -> bool:
        with suppress(httpx.HTTPError):
            return httpx.get(f"http://127.0.0.1:{front}/healthz", trust_env=False).is_success
        return False

    http = HttpOptions(host="127.0.0.1", port=front)
    with (
        gateway_of(FakeService(settings)) as gateway,
        haproxy_of(http, gateway, tmp_path, own, options),
    ):
        wait_until(answers, EVENTUALLY_S, "HAProxy finds the Gateway")
        yield front


def test_slow_and_idle_clients_are_cut_and_good_ones_served_meanwhile(hasty_port):
    cuts, good = asyncio.run(_beside_slow_clients(hasty_port))
    assert good == {200}
    assert {(cut.kind, cut.status) for cut in cuts} == {(kind, 408) for kind in KINDS}
    assert len(cuts) == NUM_SLOW_OF_A_KIND * len(KINDS)


async def _beside_slow_clients(port: int) -> tuple[list[Cut], set[int]]:
    slow = [
        asyncio.create_task(linger("127.0.0.1", port, kind, EVENTUALLY_S, every_s=0.1))
        for kind in [*KINDS] * NUM_SLOW_OF_A_KIND
    ]
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
        good = {
            (await client.post("/v1/classify", content=b"image")).status_code
            for _ in range(NUM_GOOD)
        }
    return await asyncio.gather(*slow), good
