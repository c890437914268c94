"""The simulator's input (stages and limits) and output (latencies, replicas)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SimStage:
    """One stage of the simulated service."""

    cpu_ms: float  # of an image
    cores: float  # of a replica; whole ones work at a time, at least one
    initial: int = 1
    min_replicas: int = 1
    max_replicas: int = 100
    max_batch_size: int = 1


@dataclass(frozen=True)
class Service:
    """Stages, in the order that an image visits them, and the limits on what waits."""

    stages: Mapping[str, SimStage]
    steps: Sequence[Sequence[str]]
    start_s: float = 21.0  # until a replica is ready (tests/load/results/startup.json)
    max_under_way: int = 256  # per replica of the first stage; more are refused
    timeout_s: float = 10.0  # an image that has not got its turn by then is dropped
    jitter: float = 0.1  # standard deviation of a batch's time, as a share


@dataclass
class SimulationOutcome:
    """What came of it; one entry of the lists per second, one latency per answered image."""

    replicas: dict[str, list[int]]  # ready ones
    targets: dict[str, list[int]]
    under_way: list[int] = field(default_factory=list)
    answered: list[tuple[float, float]] = field(default_factory=list)  # (arrival, latency), s
    refused: list[float] = field(default_factory=list)  # arrivals: the queues were full
    late: list[float] = field(default_factory=list)  # arrivals: dropped after timeout_s
    core_seconds: float = 0.0  # of all replicas, from their start until they ended
    num_changes: int = 0  # of a stage's target

    def p99_ms(self, since: float = 0.0, until: float = math.inf) -> float:
        """Return the 99th percentile of the latency of what arrived in between; 0 of nothing."""
        found = sorted(latency for at, latency in self.answered if since <= at < until)
        return found[math.ceil(0.99 * len(found)) - 1] * 1e3 if found else 0.0
