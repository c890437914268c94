"""Points for tests, as short as they can be written."""

from app.tune.candidates import Candidate, ReplicaLayout
from app.tune.pareto import Point


def point(
    throughput: float,
    p99_ms: float,
    *,
    replicas: int = 1,
    cores: int = 2,
    sizes: tuple[int, ...] = (1, 2, 4),
    clients: int = 8,
) -> Point:
    candidate = Candidate(ReplicaLayout(replicas, cores, 1), sizes)
    return Point(candidate, clients, throughput, p99_ms / 2, p99_ms, 3)
