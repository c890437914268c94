"""Runs work on a thread of its own, whose memory is freed when it ends."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


async def on_own_thread(name: str, work: Callable[[], T]) -> T:
    """Return what ``work`` returns on a new thread, which continues if the caller is cancelled."""
    thread = ThreadPoolExecutor(1, name)
    try:
        return await asyncio.get_running_loop().run_in_executor(thread, work)
    finally:
        thread.shutdown(wait=False)
