"""The child process of a tuning run: a replica of the graph, and the clients that load it."""

import asyncio
import contextlib
import logging
import os
import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from app.deployments.assembly import Assembly, assemble
from app.errors import ConfigError
from app.graph.observer import RequestObserver
from app.graph.request import RequestBody, RequestOptions
from app.messages import Fault
from app.queueing.byte_budget import Share
from app.settings import Settings
from models.errors import TandemError

RAMP = 0.25  # of a run's time before it, not counted, since all clients start at once
REQUEST_S = 60.0  # the limit of a request's time; the settings may have a lower one
OPTIONS = RequestOptions("tune", top_k=1, cache_control="no-store")
OOM_SCORE = Path("/proc/self/oom_score_adj")


@dataclass(frozen=True)
class LoadRequest:
    """A number of closed loops for some time; queues form batches up to ``max_batch_size``."""

    clients: int
    seconds: float
    max_batch_size: int


@dataclass(frozen=True)
class LoadMeasured:
    """The measurements of a run, without its ramp."""

    throughput: float  # images/s
    latencies_ms: list[float]


@dataclass(frozen=True)
class ReplicaFailed:
    """The error in place of an answer."""

    message: str


@dataclass(frozen=True, slots=True)
class Photo:
    """The body of a request, already in memory."""

    data: bytes

    async def read(self, share: Share) -> RequestBody:
        """Return the body; see :class:`app.graph.request.BodyReader`."""
        return RequestBody([self.data])


def serve_loads(settings: Settings, cores: Sequence[int], photos: Path, pipe: Connection) -> None:
    """Run in the child: build the graph on ``cores``, then run loads until EOF."""
    if hasattr(os, "sched_setaffinity"):  # otherwise the replicas share all cores
        os.sched_setaffinity(0, cores)
    with contextlib.suppress(OSError):  # be killed first if memory runs out
        OOM_SCORE.write_text("500")
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    try:
        graph = assemble(settings)
        bodies: list[bytes] = pickle.loads(photos.read_bytes())
        pipe.send(psutil.Process().memory_info().rss)  # after compiling the networks
        with asyncio.Runner() as runner:
            while True:
                load = pipe.recv()
                for member in graph.stages.members:
                    member.reconfigure({"max_batch_size": load.max_batch_size})
                pipe.send(runner.run(closed_loops(graph, bodies, load)))
    except (EOFError, BrokenPipeError):  # the parent is gone or has finished
        return
    except Exception as error:
        is_ours = isinstance(error, TandemError)
        pipe.send(ReplicaFailed(str(error) if is_ours else f"{type(error).__name__}: {error}"))


async def closed_loops(graph: Assembly, bodies: Sequence[bytes], load: LoadRequest) -> LoadMeasured:
    """Let ``load.clients`` send photos one after another.

    Raises:
        ConfigError: a photo was answered with a fault.

    """
    numbers = count()
    begin = time.perf_counter() + RAMP * load.seconds
    end = begin + load.seconds
    finished: list[float] = []
    latencies_ms: list[float] = []

    async def client() -> None:
        while (sent := time.perf_counter()) < end:
            body = bodies[next(numbers) % len(bodies)]
            (result,) = await graph.service.answer(Photo(body), OPTIONS, RequestObserver())
            if isinstance(result, Fault):
                raise ConfigError(f"a photo could not be classified: {result.message}")
            if (now := time.perf_counter()) >= begin:
                finished.append(now)
                latencies_ms.append((now - sent) * 1e3)

    await asyncio.gather(*(client() for _ in range(load.clients)))
    num_in_time = sum(now < end for now in finished)
    if num_in_time:
        return LoadMeasured(num_in_time / load.seconds, latencies_ms)
    # Each client took longer than the run.
    return LoadMeasured(len(finished) / (max(finished) - begin), latencies_ms)
