"""Discrete-event simulation of the service: queues, batches and replicas.

A replica has cores and a queue. A free core takes waiting images, at most a batch, as
:mod:`app.queueing.batch_queue` does, and is busy for their CPU time. An image goes from step to
step; the stages of a step work on it in parallel. Of two drawn replicas the one with less work gets
it, as in Serve's routing. HTTP and the network are not simulated.
"""

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np


def poisson_arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """Draw the times (s from the start, ascending) of independent arrivals at ``rate`` per s."""
    expected = rate * seconds
    num_drawn = math.ceil(expected + 6 * math.sqrt(expected) + 10)  # enough, except once in 1e9
    times = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, num_drawn))
    return [float(time) for time in times[times < seconds]]


@dataclass(frozen=True, slots=True)
class SimStage:
    """A stage of the simulated service."""

    cpu_ms: float  # per image
    cores: float  # per replica; as many batches run at a time, at least one
    replicas: int = 1
    max_batch_size: int = 1


@dataclass(frozen=True)
class Service:
    """The stages in an image's order, and the limits of waiting."""

    stages: Mapping[str, SimStage]
    steps: Sequence[Sequence[str]]
    max_under_way: int = 256  # per replica of the first stage; further images are refused
    timeout_s: float = 10.0  # an image that has not been started by then is dropped
    jitter: float = 0.1  # standard deviation of a batch's time, as a share


@dataclass
class SimulationOutcome:
    """The result of a simulation: a latency per answered image."""

    answered: list[tuple[float, float]] = field(default_factory=list)  # (arrival, latency), s
    refused: list[float] = field(default_factory=list)  # arrivals: the queues were full
    late: list[float] = field(default_factory=list)  # arrivals: dropped after timeout_s

    def p99_ms(self, since: float = 0.0, until: float = math.inf) -> float:
        """Return the 99th percentile of latency, in ms, of arrivals in a period; 0 without any."""
        latencies = sorted(latency for at, latency in self.answered if since <= at < until)
        return latencies[math.ceil(0.99 * len(latencies)) - 1] * 1e3 if latencies else 0.0


@dataclass(slots=True, eq=False)
class SimReplica:
    """A replica of the simulation."""

    stage: str
    num_cores: int
    num_busy: int = 0
    batch_images: int = 0
    queue: deque["SimImage"] = field(default_factory=deque)

    @property
    def num_ongoing(self) -> int:
        """Images that wait or are being computed."""
        return len(self.queue) + self.batch_images


@dataclass(slots=True, eq=False)
class SimImage:
    """An image of the simulation."""

    arrived: float
    step: int = -1
    num_pending: int = 0  # stages of the present step that still work on it
    is_lost: bool = False


class Simulation:
    """A simulation of a service."""

    def __init__(self, service: Service, seed: int = 0) -> None:
        self._service, self._rng = service, random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events, self._now, self._under_way = 0, 0.0, 0
        self.outcome = SimulationOutcome()
        self._replicas = {
            name: [SimReplica(name, max(1, int(stage.cores))) for _ in range(stage.replicas)]
            for name, stage in service.stages.items()
        }

    def run(self, arrivals: Sequence[float]) -> SimulationOutcome:
        """Simulate arrivals (s from the start, ascending) until all are answered.

        Its running time depends on the number of arrivals, not on the simulated time.
        """
        coming = iter([*arrivals, math.inf])
        arrival = next(coming)
        while True:
            event = self._events[0][0] if self._events else math.inf
            self._now = min(arrival, event)
            if self._now == math.inf:
                return self.outcome
            if event <= self._now:
                heapq.heappop(self._events)[-1]()
                continue
            arrival = next(coming)
            fronts = self._replicas[self._service.steps[0][0]]
            if self._under_way >= self._service.max_under_way * len(fronts):
                self.outcome.refused.append(self._now)
                continue
            self._under_way += 1
            self._advance(SimImage(self._now))

    def _advance(self, image: SimImage) -> None:
        image.step += 1
        if image.step == len(self._service.steps):
            self._under_way -= 1
            self.outcome.answered.append((image.arrived, self._now - image.arrived))
            return
        names = self._service.steps[image.step]
        image.num_pending = len(names)
        for name in names:
            drawn = (self._rng.choice(self._replicas[name]) for _ in range(2))
            replica = min(drawn, key=lambda each: each.num_ongoing)  # the first of equals
            replica.queue.append(image)
            self._start(replica)

    def _start(self, replica: SimReplica) -> None:
        """Let free cores take waiting images."""
        stage = self._service.stages[replica.stage]
        while replica.queue and replica.num_busy < replica.num_cores:
            batch: list[SimImage] = []
            while replica.queue and len(batch) < stage.max_batch_size:
                image = replica.queue.popleft()
                if self._is_wanted(image):
                    batch.append(image)
            if batch:
                replica.num_busy += 1
                replica.batch_images += len(batch)
                drawn = max(0.5, self._rng.gauss(1.0, self._service.jitter))
                ends_s = self._now + len(batch) * stage.cpu_ms * drawn / 1e3
                self._num_events += 1
                finished: Callable[[], None] = partial(self._finished, replica, batch)
                heapq.heappush(self._events, (ends_s, self._num_events, finished))

    def _is_wanted(self, image: SimImage) -> bool:
        if self._now - image.arrived > self._service.timeout_s and not image.is_lost:
            image.is_lost = True
            self._under_way -= 1
            self.outcome.late.append(image.arrived)
        return not image.is_lost

    def _finished(self, replica: SimReplica, batch: list[SimImage]) -> None:
        replica.num_busy -= 1
        replica.batch_images -= len(batch)
        for image in batch:
            image.num_pending -= 1
            if image.num_pending == 0 and not image.is_lost:
                self._advance(image)
        self._start(replica)
