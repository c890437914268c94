"""The router of the stages on a real Serve: a replica that hangs is left out until it speaks."""

import asyncio
import os
import signal

import psutil
import pytest
from ray import serve

from app.graph.availability import HedgeBudget, hedged
from app.main import LOCALITY_ROUTING
from app.serve.locality_router import LocalityRouter
from tests.support.services.processes import EVENTUALLY_S, wait_until

NUM_CALLS, EVERY_S, AFTER_S = 200, 0.01, 4.0
LIMIT_S = 300


@pytest.fixture
def handle(served):  # who has started Serve
    class Who:  # defined here, so that the replicas need not find this file
        async def pid(self) -> int:
            await asyncio.sleep(0.2)  # the others come meanwhile
            return os.getpid()

    deployment = serve.deployment(
        name="Who",
        num_replicas=2,
        max_ongoing_requests=100,
        ray_actor_options={"num_cpus": 0},
        health_check_timeout_s=600,  # Serve itself must not end it before the test does
        request_router_config=LOCALITY_ROUTING,
    )(Who)
    try:
        yield serve.run(deployment.bind(), name="who", route_prefix=None)
    finally:
        serve.delete("who")


def answering(handle):
    """Return who answers a stream of calls, and how many had to be made a second time."""
    made = 0

    async def call() -> int:
        nonlocal made
        made += 1
        return await handle.pid.remote()

    async def all_of_them() -> list[int]:
        calls = []
        for _ in range(NUM_CALLS):
            calls.append(asyncio.create_task(hedged(call, AFTER_S, HedgeBudget(), 1)))
            await asyncio.sleep(EVERY_S)
        async with asyncio.timeout(LIMIT_S):  # the second ones may have gone there too
            return await asyncio.gather(*calls)

    return set(asyncio.run(all_of_them())), made - NUM_CALLS


@pytest.mark.slow  # make test has tests/unit/calls
def test_a_replica_that_hangs_is_left_out_until_it_speaks(handle):
    wait_until(lambda: len(answering(handle)[0]) == 2, EVENTUALLY_S, "two replicas that answer")
    victim = min(answering(handle)[0])
    hanging = psutil.Process(victim)
    hanging.send_signal(signal.SIGSTOP)
    try:
        found, later = answering(handle), answering(handle)
    finally:
        hanging.send_signal(signal.SIGCONT)
    assert victim not in found[0] | later[0]
    assert later[1] <= 1  # after those that were there already
    wait_until(
        lambda: victim in answering(handle)[0], EVENTUALLY_S, "the replica that speaks again"
    )


def test_it_is_the_router_that_the_stages_have():
    module, _, name = LOCALITY_ROUTING["request_router_class"].partition(":")
    assert (module, name) == (LocalityRouter.__module__, LocalityRouter.__name__)
