"""Discrete-event simulation of the service: queues, batches, replicas that start and stop.

A replica has cores and one queue; a free core takes what waits, at most a batch,
as :mod:`app.queueing.batch_queue` does, and is busy for its images' CPU time. An image goes from
step to step; stages of one step have it at the same time. Two replicas are drawn and the one with
less to do gets it, as Serve routes. What HTTP and the network take is not in it.
"""

import heapq
import math
import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from app.planning.simulated_service import Service, SimulationOutcome
from app.scaling.usage import UsageReport

TICK_S = 0.5  # Serve's control loop (app.environment.serve_environment)
REPORT_S = 1.0  # metrics_interval_s; a report is known one such interval later


@dataclass(slots=True, eq=False)
class SimReplica:
    """One replica, and what it has reported."""

    stage: str
    num_cores: int
    num_busy: int = 0
    num_arrived: int = 0
    num_done: int = 0
    cpu_ms: float = 0.0
    is_ready: bool = False
    is_ending: bool = False
    queue: deque["_Image"] = field(default_factory=deque)
    reports: list[UsageReport] = field(default_factory=list)
    batch_images: int = 0

    @property
    def num_ongoing(self) -> int:
        """Images that wait or are worked on."""
        return len(self.queue) + self.batch_images


@dataclass(slots=True, eq=False)
class _Image:
    arrived: float
    step: int = -1
    num_pending: int = 0  # stages of the present step that have it still
    is_lost: bool = False


class Autoscaler(Protocol):
    """Decides at every tick, from what the replicas of each stage have reported so far."""

    def decide(
        self, now: float, running: Mapping[str, Sequence[SimReplica]], targets: Mapping[str, int]
    ) -> Mapping[str, int]:
        """Return the replicas wanted; a stage that is not in it is left alone."""
        ...


class Simulation:
    """One run of a service; without an autoscaler its replicas stay as they are at the start."""

    def __init__(
        self, service: Service, autoscaler: Autoscaler | None = None, seed: int = 0
    ) -> None:
        self._service, self._autoscaler = service, autoscaler
        self._rng = random.Random(seed)
        self._replicas: dict[str, list[SimReplica]] = {name: [] for name in service.stages}
        self._able: dict[str, list[SimReplica]] = {}  # those that calls are routed to
        self._targets = {name: stage.initial for name, stage in service.stages.items()}
        self._events: list[tuple[float, int, SimReplica, list[_Image] | None]] = []
        self._num_events, self._now, self._under_way = 0, 0.0, 0
        self.outcome = SimulationOutcome(
            {n: [] for n in service.stages}, {n: [] for n in service.stages}
        )
        for name, number in self._targets.items():
            for _ in range(number):
                self._add(name).is_ready = True
            self._update_able(name)

    def run(self, arrivals: Sequence[float], until: float) -> SimulationOutcome:
        """Play arrivals (s from the start, rising) until the end or until all are answered.

        Without an autoscaler nothing is accounted by the second either, so it takes as long as
        there are arrivals, however far apart they are.
        """
        num_ticks = math.ceil(until / TICK_S) if self._autoscaler else 0
        ticks = (n * TICK_S for n in range(1, num_ticks + 1))
        coming, tick = iter([*arrivals, math.inf]), next(ticks, math.inf)
        arrival = next(coming)
        while True:
            event = self._events[0][0] if self._events else math.inf
            self._now = min(arrival, tick, event)
            if self._now == math.inf:
                return self.outcome
            if event <= self._now:
                _, _, replica, batch = heapq.heappop(self._events)
                self._finished(replica, batch)
            elif arrival <= self._now:
                self._arrive()
                arrival = next(coming)
            elif self._autoscaler:
                self._tick(self._autoscaler)
                tick = next(ticks, math.inf)

    def _arrive(self) -> None:
        fronts = self._able[self._service.steps[0][0]]
        if self._under_way >= self._service.max_under_way * len(fronts):
            self.outcome.refused.append(self._now)
            self._rng.choice(fronts).num_arrived += 1
            return
        self._under_way += 1
        self._advance(_Image(self._now))

    def _advance(self, image: _Image) -> None:
        """Send an image to the next step's stages, or answer it."""
        image.step += 1
        if image.step == len(self._service.steps):
            self._under_way -= 1
            self.outcome.answered.append((image.arrived, self._now - image.arrived))
            return
        names = self._service.steps[image.step]
        image.num_pending = len(names)
        for name in names:
            replica = self._route(name)
            replica.num_arrived += 1
            replica.queue.append(image)
            self._start(replica)

    def _route(self, name: str) -> SimReplica:
        able = self._able[name]
        one, other = self._rng.choice(able), self._rng.choice(able)
        return one if one.num_ongoing <= other.num_ongoing else other

    def _start(self, replica: SimReplica) -> None:
        """Let free cores take what waits."""
        stage = self._service.stages[replica.stage]
        while replica.queue and replica.num_busy < replica.num_cores:
            batch: list[_Image] = []
            while replica.queue and len(batch) < stage.max_batch_size:
                image = replica.queue.popleft()
                if self._is_wanted(image):
                    batch.append(image)
            if batch:
                work_ms = len(batch) * stage.cpu_ms
                work_ms *= max(0.5, self._rng.gauss(1.0, self._service.jitter))
                replica.num_busy += 1
                replica.batch_images += len(batch)
                replica.cpu_ms += work_ms
                self._schedule(work_ms / 1e3, replica, batch)

    def _is_wanted(self, image: _Image) -> bool:
        if self._now - image.arrived > self._service.timeout_s and not image.is_lost:
            image.is_lost = True
            self._under_way -= 1
            self.outcome.late.append(image.arrived)
        return not image.is_lost

    def _finished(self, replica: SimReplica, batch: list[_Image] | None) -> None:
        """End a batch; None: a replica's start."""
        if batch is None:
            replica.is_ready = True
            self._update_able(replica.stage)
            return
        replica.num_busy -= 1
        replica.batch_images -= len(batch)
        replica.num_done += len(batch)
        for image in batch:
            image.num_pending -= 1
            if image.num_pending == 0 and not image.is_lost:
                self._advance(image)
        self._start(replica)

    def _tick(self, autoscaler: Autoscaler) -> None:
        """Account, report and scale."""
        running = {n: [r for r in of if r.is_ready] for n, of in self._replicas.items()}
        if self._now % REPORT_S == 0:
            self._account(running)
        decided = autoscaler.decide(self._now, running, self._targets)
        for name, replicas in decided.items():
            self.outcome.num_changes += replicas != self._targets[name]
            self._targets[name] = replicas
            self._scale(name, replicas)

    def _account(self, running: Mapping[str, list[SimReplica]]) -> None:
        for name, stage in self._service.stages.items():
            self.outcome.replicas[name].append(sum(not r.is_ending for r in running[name]))
            self.outcome.targets[name].append(self._targets[name])
            self.outcome.core_seconds += len(self._replicas[name]) * stage.cores * REPORT_S
            is_front = name == self._service.steps[0][0]  # it has an image until it is answered
            for r in running[name]:
                waiting = self._under_way / len(running[name]) if is_front else r.num_ongoing
                counts = (r.num_arrived, r.num_done, waiting, r.cpu_ms)
                r.reports.append(UsageReport(self._now, *counts, stage.cores, stage.cpu_ms))
        self.outcome.under_way.append(self._under_way)

    def _scale(self, name: str, target: int) -> None:
        """Start replicas, or let the youngest end when they have no work left."""
        present = [r for r in self._replicas[name] if not r.is_ending]
        for _ in range(target - len(present)):
            self._schedule(self._service.start_s, self._add(name), None)
        for replica in reversed(present[target:]):
            replica.is_ending = True
        present = self._replicas[name]
        self._replicas[name] = [r for r in present if not r.is_ending or r.num_ongoing]
        self._update_able(name)

    def _update_able(self, name: str) -> None:
        self._able[name] = [r for r in self._replicas[name] if r.is_ready and not r.is_ending]

    def _add(self, name: str) -> SimReplica:
        replica = SimReplica(name, max(1, int(self._service.stages[name].cores)))
        self._replicas[name].append(replica)
        return replica

    def _schedule(self, after_s: float, replica: SimReplica, batch: list[_Image] | None) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (self._now + after_s, self._num_events, replica, batch))


def known(replica: SimReplica, now: float) -> Iterator[UsageReport]:
    """Return the reports that have reached the controller: one interval after they were made."""
    return (report for report in replica.reports[-12:] if report.at <= now - REPORT_S)
