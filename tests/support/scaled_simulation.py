"""The simulated service with replicas that come and go as our autoscaling policy decides."""

import heapq
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from app.queueing.admission import UsageReport
from app.serve.scaling import ScalingOptions, StageMeter, StageState, State, decide, demand
from calibration.simulator import (
    Service,
    SimImage,
    SimReplica,
    SimStage,
    Simulation,
    SimulationOutcome,
)

TICK_S = 0.5  # Serve's control loop (app.environment.serve_environment)
REPORT_S = 1.0  # metrics_interval_s; a report is known one such interval later


@dataclass(frozen=True, slots=True)
class ScaledStage(SimStage):
    """A stage that scales within limits."""

    min_replicas: int = 1
    max_replicas: int = 100


@dataclass(frozen=True)
class ScaledService(Service):
    """A service whose stages scale."""

    stages: Mapping[str, ScaledStage]
    start_s: float = 21.0  # until a replica is ready (tests/load/results/startup.json)


@dataclass
class ScaledOutcome(SimulationOutcome):
    """What came of it; one entry of the lists per second."""

    replicas: dict[str, list[int]] = field(default_factory=dict)  # ready ones
    targets: dict[str, list[int]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class ScaledReplica(SimReplica):
    """A replica, and what it has reported."""

    num_arrived: int = 0
    num_done: int = 0
    cpu_ms: float = 0.0
    is_ready: bool = True
    is_ending: bool = False
    reports: list[UsageReport] = field(default_factory=list)

    def known(self, now: float) -> Iterator[UsageReport]:
        """Return the reports that have reached the controller: an interval after they were made."""
        return (report for report in self.reports[-12:] if report.at <= now - REPORT_S)


class Autoscaler(Protocol):
    """Decides at every tick, from what the replicas of each stage have reported so far."""

    def decide(
        self, now: float, running: Mapping[str, Sequence[ScaledReplica]], targets: Mapping[str, int]
    ) -> Mapping[str, int]:
        """Return the replicas wanted; a stage that is not in it is left alone."""
        ...


class ScaledSimulation(Simulation):
    """One run of a service; ``_replicas`` are those that calls are routed to."""

    _service: ScaledService
    _replicas: dict[str, list[ScaledReplica]]  # type: ignore[assignment]  # as _made makes them
    outcome: ScaledOutcome

    def __init__(self, service: ScaledService, autoscaler: Autoscaler, seed: int = 0) -> None:
        super().__init__(service, seed)
        self._autoscaler = autoscaler
        self._present = {name: list(replicas) for name, replicas in self._replicas.items()}
        self._targets = {name: stage.replicas for name, stage in service.stages.items()}
        self.outcome = ScaledOutcome(
            replicas={name: [] for name in service.stages},
            targets={name: [] for name in service.stages},
        )

    def run(self, arrivals: Sequence[float], until: float = 0.0) -> ScaledOutcome:
        for number in range(1, math.ceil(until / TICK_S) + 1):
            # After all else that happens at that moment.
            heapq.heappush(self._events, (number * TICK_S, sys.maxsize, self._tick))
        super().run(arrivals)
        return self.outcome

    def _arrive(self) -> None:
        num_refused = len(self.outcome.refused)
        super()._arrive()
        if len(self.outcome.refused) > num_refused:
            self._rng.choice(self._replicas[self._service.steps[0][0]]).num_arrived += 1

    def _route(self, name: str) -> ScaledReplica:
        replica = super()._route(name)
        assert isinstance(replica, ScaledReplica)
        replica.num_arrived += 1
        return replica

    def _work_ms(self, replica: SimReplica, num_images: int) -> float:
        assert isinstance(replica, ScaledReplica)
        work_ms = super()._work_ms(replica, num_images)
        replica.cpu_ms += work_ms
        return work_ms

    def _finished(self, replica: SimReplica, batch: list[SimImage]) -> None:
        assert isinstance(replica, ScaledReplica)
        replica.num_done += len(batch)
        super()._finished(replica, batch)

    def _made(self, name: str) -> ScaledReplica:
        return ScaledReplica(name, max(1, int(self._service.stages[name].cores)))

    def _tick(self) -> None:
        """Account, report and scale."""
        running = {n: [r for r in of if r.is_ready] for n, of in self._present.items()}
        if self._now % REPORT_S == 0:
            self._account(running)
        decided = self._autoscaler.decide(self._now, running, self._targets)
        for name, replicas in decided.items():
            self._targets[name] = replicas
            self._scale(name, replicas)

    def _account(self, running: Mapping[str, list[ScaledReplica]]) -> None:
        for name, stage in self._service.stages.items():
            self.outcome.replicas[name].append(sum(not r.is_ending for r in running[name]))
            self.outcome.targets[name].append(self._targets[name])
            is_front = name == self._service.steps[0][0]  # it has an image until it is answered
            for r in running[name]:
                waiting = self._under_way / len(running[name]) if is_front else r.num_ongoing
                counts = (r.num_arrived, r.num_done, waiting, r.cpu_ms)
                r.reports.append(UsageReport(self._now, *counts, stage.cores, stage.cpu_ms))

    def _scale(self, name: str, target: int) -> None:
        """Start replicas, or let the youngest end when they have no work left."""
        present = [r for r in self._present[name] if not r.is_ending]
        for _ in range(target - len(present)):
            replica = self._made(name)
            replica.is_ready = False
            self._present[name].append(replica)
            self._schedule(self._service.start_s, partial(self._started, replica))
        for replica in reversed(present[target:]):
            replica.is_ending = True
        present = self._present[name]
        self._present[name] = [r for r in present if not r.is_ending or r.num_ongoing]
        self._route_to_able(name)

    def _started(self, replica: ScaledReplica) -> None:
        replica.is_ready = True
        self._route_to_able(replica.stage)

    def _route_to_able(self, name: str) -> None:
        present = self._present[name]
        self._replicas[name] = [r for r in present if r.is_ready and not r.is_ending]


class PolicyAutoscaler:
    """Measures and decides with the same code as :mod:`app.serve.scaling`."""

    def __init__(self, service: ScaledService, options: ScalingOptions | None = None) -> None:
        self._service, self._options = service, options or ScalingOptions.model_validate({})
        self._meters = {name: StageMeter() for name in service.stages}
        self._state = State()

    def decide(
        self, now: float, running: Mapping[str, Sequence[ScaledReplica]], targets: Mapping[str, int]
    ) -> Mapping[str, int]:
        """Return the replicas of every stage."""
        stages = {}
        for name, stage in self._service.stages.items():
            meter = self._meters[name]
            meter.update({id(r): list(r.known(now)) for r in running[name]}, now)
            cpu_ms = meter.cpu_ms() or stage.cpu_ms
            limits = (stage.min_replicas, stage.max_replicas)
            stages[name] = StageState(cpu_ms, stage.cores, *limits, targets[name])
        arriving = demand(self._meters)
        if arriving is None:
            return {}
        decision = decide(stages, arriving, self._state, now, self._options)
        self._state = decision.state
        return decision.targets
