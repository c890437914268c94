"""Threads that run networks, sized by a replica's cores; their health, and the memory that is free.

Limits on CPU and memory come from the machine, its control groups and the user. Every group from
the process's own up to the root may have a limit; the tightest counts.
"""

import asyncio
import logging
import math
import os
import resource
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import psutil

from app.errors import UnhealthyError
from app.queueing.scheduler import BatchScheduler
from models.machine import PROC, available_cpus, group_folders

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
        """Return as many other threads, which take turns with these on the same cores.

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
        text = "num_cpus %d, streams %d, but this replica has %d cores: it uses those"
        logger.warning(text, whole, streams, cores)
    return inference_threads_for(cores, streams)


def replica_cores(at_most: int) -> int:
    """Return the cores that ``at_most`` busy threads of this replica can use."""
    return min(at_most, _whole_cpus() or available_cpus())


def _whole_cpus() -> int:
    """Return ``num_cpus`` of this replica; 0 if below 1, which is only a share for placement."""
    import ray  # late: tandem serve sets the environment that Ray reads at its import

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


MAX_FAILURES = 3  # in a row
MAX_RUN_S = 30.0  # far above the largest batch, or the largest picture, which takes a second
REPLACED = "Serve replaces the replica; its log has the errors"


class Health:
    """Watches every run of some work, on any thread; Serve replaces an unhealthy replica.

    Errors name the ``work`` in the singular: "batch of resnet50". Repeated failures are unhealthy,
    unless a client's file may cause them (``counts_failures`` is False).
    """

    def __init__(
        self,
        work: str,
        clock: Callable[[], float] = time.monotonic,
        *,
        counts_failures: bool = True,
    ) -> None:
        self._work, self._clock, self._counts_failures = work, clock, counts_failures
        self._num_failures = 0
        self._running: dict[int, float] = {}  # start times, by the run's number
        self._numbers = count()

    @contextmanager
    def run(self) -> Iterator[None]:
        """Watch the block as a run; a cancelled caller is not a failure."""
        number = next(self._numbers)
        self._running[number] = self._clock()
        try:
            yield
        except Exception:
            self._num_failures += self._counts_failures
            raise
        else:
            self._num_failures = 0
        finally:
            del self._running[number]

    def check(self) -> None:
        """Raise :class:`UnhealthyError` if the last runs all failed, or a run does not end."""
        if self._num_failures >= MAX_FAILURES:
            raise UnhealthyError(
                f"{self._num_failures} times in a row a {self._work} failed; {REPLACED}"
            )
        since = min(list(self._running.values()), default=None)  # a copy: threads may change it
        if since is not None and (taken_s := self._clock() - since) > MAX_RUN_S:
            problem = f"a {self._work} has run for {taken_s:.0f} s, the limit is {MAX_RUN_S:g}"
            raise UnhealthyError(f"{problem}; {REPLACED}")


class Limit(NamedTuple):
    """A limit, and how much of it is used."""

    most: float  # math.inf without a limit
    used: float

    @property
    def left(self) -> float:
        return max(0.0, self.most - self.used)


def memory_left(proc: Path = PROC, *, at_most: bool = False) -> float:
    """Return the bytes that the process may still allocate; infinite without a limit.

    With ``at_most`` the groups' swap counts too, and the memory of cached files in use.
    """
    folders = list(group_folders("memory", proc))
    left = min((_memory(folder, at_most=at_most).left for folder in folders), default=math.inf)
    if math.isinf(left) or not at_most:
        return left
    return left + min((psutil.swap_memory().free, *map(_swap_left, folders)))


def free_memory(proc: Path = PROC, *, with_files: bool = False) -> int:
    """Return the machine's free bytes, or what the tightest limit of a group leaves if less.

    ``with_files``: cached files in use count as free. A load evicts them.
    """
    limits = (_memory(folder, at_most=with_files) for folder in group_folders("memory", proc))
    return int(min((psutil.virtual_memory().available, *(limit.left for limit in limits))))


def tightest_pids_limit(proc: Path = PROC) -> Limit:
    """Return the limit of processes and threads that leaves the fewest."""
    limits = [
        Limit(_number(folder, "pids.max"), _number(folder, "pids.current", 0))
        for folder in group_folders("pids", proc)
    ]
    return min(limits, key=lambda limit: limit.left, default=Limit(math.inf, 0))


def user_limit() -> Limit:
    """Return this user's limit of processes and threads; root has none."""
    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if most == resource.RLIM_INFINITY or os.geteuid() == 0:
        return Limit(math.inf, 0)
    processes = psutil.process_iter(["uids", "num_threads"])
    own = [p.info for p in processes if p.info["uids"] and p.info["uids"].real == os.getuid()]
    return Limit(most, sum(info["num_threads"] or 1 for info in own))


def _memory(folder: Path, *, at_most: bool) -> Limit:
    if (folder / "memory.max").exists():
        most, used = (_number(folder, f"memory.{name}") for name in ("max", "current"))
    else:
        most, used = (_number(folder, f"memory.{name}_in_bytes") for name in ("limit", "usage"))
    if math.isinf(most) or math.isinf(used):
        return Limit(math.inf, 0)
    files = _files(folder, "inactive_file") + at_most * _files(folder, "active_file")
    return Limit(most, used - files)


def _swap_left(folder: Path) -> float:
    if not math.isinf(most := _number(folder, "memory.memsw.limit_in_bytes")):  # memory and swap
        return max(0.0, most - _number(folder, "memory.limit_in_bytes"))
    return max(0.0, _number(folder, "memory.swap.max") - _number(folder, "memory.swap.current", 0))


def _files(folder: Path, kind: str) -> int:
    """Return bytes of cached files that count as used, but are freed when memory is needed."""
    words = list[str]()
    with suppress(OSError, ValueError):
        words = (folder / "memory.stat").read_text("ascii").split()
    facts = dict(zip(words[::2], words[1::2], strict=False))
    # In version 1 the plain count omits child groups, the total includes them.
    return int(facts.get(f"total_{kind}", facts.get(kind, "0")))


def _number(folder: Path, file: str, otherwise: float = math.inf) -> float:
    try:
        return int((folder / file).read_text("ascii"))
    except (OSError, ValueError):  # "max" is not a number
        return otherwise
