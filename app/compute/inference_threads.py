"""Threads that run networks, sized by the cores of a replica, and threads that load them."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import ray

from app.queueing.scheduler import BatchScheduler
from models.cpus import available_cpus

logger = logging.getLogger("ray.serve")
T = TypeVar("T")
R = TypeVar("R")


class InferenceThreads:
    """Runs ``num`` batches at a time, each on a thread, off the replica's event loop.

    All members of a process share these threads. A thread only waits for OpenVINO, whose own
    threads compute, so one per batch is enough.
    """

    def __init__(self, num: int, threads_each: int = 1) -> None:
        self.num, self.threads_each = num, threads_each
        self.scheduler = BatchScheduler(num, threads_each, num_ahead=num)
        self._executor = ThreadPoolExecutor(num, "infer")

    def apart(self) -> "InferenceThreads":
        """Return other threads of the same number, which take turns with these on the same cores.

        A batch that hangs on one of them does not block these.
        """
        # A batch that was formed ahead would begin at once on the other threads.
        self.scheduler.num_ahead = 0
        others = InferenceThreads(self.num, self.threads_each)
        others.scheduler = self.scheduler
        return others

    @property
    def cores(self) -> int:
        """The cores that the threads keep busy together."""
        return self.num * self.threads_each

    def run(self, work: Callable[[T], R], value: T) -> asyncio.Future[R]:
        """Run ``work`` on a thread, in the order of the calls; return the future of its result."""
        return asyncio.get_running_loop().run_in_executor(self._executor, work, value)


def replica_inference_threads(streams: int, num_sharing: int = 1) -> InferenceThreads:
    """Return this replica's threads: one for each of its cores, or ``streams``.

    ``num_sharing`` replicas without whole CPUs of their own divide the machine's cores.
    """
    whole = _whole_cpus()
    cores = min(whole, available_cpus()) if whole else max(1, available_cpus() // num_sharing)
    if whole > cores or streams > cores:
        logger.warning(
            "num_cpus %d, streams %d, but this replica has %d cores: it uses those",
            whole,
            streams,
            cores,
        )
    return inference_threads_for(cores, streams)


def replica_cores(at_most: int) -> int:
    """Return the cores that ``at_most`` busy threads of this replica can use."""
    return min(at_most, _whole_cpus() or available_cpus())


def _whole_cpus() -> int:
    """Return ``num_cpus`` of this replica; 0 if below 1, which is only a share for placement."""
    if not ray.is_initialized():
        return 0
    context: Any = ray.get_runtime_context()  # Ray's stub has no types
    return int(context.get_assigned_resources().get("CPU", 0))


def inference_threads_for(cores: int, streams: int) -> InferenceThreads:
    """Divide ``cores`` among ``streams`` batches at a time.

    With 0 streams, or more than cores, each core gets a stream.
    """
    num = min(streams, cores) if streams else cores
    return InferenceThreads(num, max(1, cores // num))


async def on_own_thread(name: str, work: Callable[[], R]) -> R:
    """Return what ``work`` returns on a new thread, which continues if the caller is cancelled.

    The memory of a thread is freed when it ends.
    """
    thread = ThreadPoolExecutor(1, name)
    try:
        return await asyncio.get_running_loop().run_in_executor(thread, work)
    finally:
        thread.shutdown(wait=False)
