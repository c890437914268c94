"""The cores of one process: how many it may use, and the threads that run networks on them."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import ray

from app.turns import Turns
from models.cpus import available_cpus

T = TypeVar("T")
R = TypeVar("R")


class Workers:
    """``num`` batches at a time, each on a thread of its own, off the replica's loop.

    All members of a process share one of these. A thread only waits for OpenVINO, whose own threads
    compute, so there is no need for more of them than batches.
    """

    def __init__(self, num: int, threads_each: int = 1) -> None:
        self.num, self.threads_each = num, threads_each
        self.turns = Turns(num)
        self._threads = ThreadPoolExecutor(num, "infer")

    async def run(self, work: Callable[[T], R], value: T) -> R:
        """Run ``work`` on a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, value)


def replica_cores(num_sharing: int = 1) -> int:
    """Return the cores of this replica: its ``num_cpus``, if it has whole ones.

    Less than one is a share for placement only: then the machine's cores count, divided by the
    ``num_sharing`` replicas that work at the same time.
    """
    whole = 0
    if ray.is_initialized():
        context: Any = ray.get_runtime_context()  # untyped
        whole = int(context.get_assigned_resources().get("CPU", 0))
    return min(whole, available_cpus()) if whole else max(1, available_cpus() // num_sharing)


def workers_for(cores: int, streams: int) -> Workers:
    """Share ``cores`` among ``streams`` batches at a time; 0 streams: one on every core.

    More streams than cores are refused by nobody but bring nothing: they are cut to the cores.
    """
    num = min(streams, cores) if streams else cores
    return Workers(num, max(1, cores // num))
