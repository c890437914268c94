"""The router of the stages on a real Serve: a replica that hangs is left out until it speaks."""

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from deployed import Served, wait_until
from ray import serve

from app.hedge import Budget, hedged
from app.main import NEAR
from app.near_router import NearRouter

NUM_CALLS, AFTER_S = 20, 2.0


@pytest.fixture
def handle(served: Served) -> Iterator[Any]:  # who has started Serve
    class Who:  # defined here, so that the replicas need not find this file
        def pid(self) -> int:
            return os.getpid()

    deployment = serve.deployment(
        name="Who",
        num_replicas=2,
        ray_actor_options={"num_cpus": 0},
        health_check_timeout_s=600,  # Serve itself must not end it before the test does
        request_router_config=NEAR,
    )(Who)
    try:
        yield serve.run(deployment.bind(), name="who", route_prefix=None)
    finally:
        serve.delete("who")


def asked(handle: Any) -> tuple[set[int], int]:
    """Return who answers some calls, one after the other, and how many were made a second time."""
    made = 0

    async def call() -> int:
        nonlocal made
        made += 1
        return await handle.pid.remote()

    async def all_of_them() -> set[int]:
        return {await hedged(call, AFTER_S, Budget()) for _ in range(NUM_CALLS)}

    return asyncio.run(all_of_them()), made - NUM_CALLS


def test_a_replica_that_hangs_is_called_once_and_again_when_it_speaks(handle: Any) -> None:
    wait_until(lambda: len(asked(handle)[0]) == 2, 30, "two replicas that answer")
    victim = min(asked(handle)[0])
    hanging = psutil.Process(victim)
    hanging.send_signal(signal.SIGSTOP)
    try:
        for _ in range(2):
            who, again = asked(handle)
            assert victim not in who
            assert again < NUM_CALLS // 4  # once, and a stall of this machine; by chance ten
    finally:
        hanging.send_signal(signal.SIGCONT)
    wait_until(lambda: victim in asked(handle)[0], 30, "the replica that speaks again")


def test_it_is_the_router_that_the_stages_have() -> None:
    module, _, name = NEAR["request_router_class"].partition(":")
    assert (module, name) == (NearRouter.__module__, NearRouter.__name__)
