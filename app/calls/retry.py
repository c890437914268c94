"""Retries a call whose replica died, on another one: classifying is idempotent.

Serve sends a call again itself when the replica was gone before it had the call; when it dies with
the call, the caller is told, since Serve cannot know whether a second time does harm.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from ray.exceptions import RayActorError

T = TypeVar("T")

# A request that kills whoever runs it must not go through all replicas: it gets two more.
MAX_CALLS = 3
RETRY_PAUSE_S = (
    0.05  # in which Serve's router marks the replica; the deadline ends this wait as any other
)


async def retry(call: Callable[[], Awaitable[T]], pause_s: float = RETRY_PAUSE_S) -> T:
    """Make a call until a replica lives through it, ``MAX_CALLS`` times at most.

    Raises:
        RayActorError: the last of them died as well.

    """
    for _ in range(MAX_CALLS - 1):
        try:
            return await call()
        except RayActorError:  # died, or out of reach; an error that the stage raised is another
            await asyncio.sleep(pause_s)
    return await call()
