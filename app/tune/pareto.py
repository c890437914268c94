"""The Pareto front of throughput against p99, and the recommended point on it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from app.tune.candidates import Candidate

NEARLY = 0.97  # of the best throughput: within noise, so the smaller candidate is chosen


@dataclass(frozen=True)
class RunResult:
    """The measurements of one run."""

    throughput: float  # images/s of all replicas
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True)
class Point:
    """A candidate under a number of clients: medians over its runs."""

    candidate: Candidate
    clients: int
    throughput: float  # images/s
    p50_ms: float
    p99_ms: float
    num_runs: int = 1
    spread: float = 0.0  # highest less lowest throughput of the runs, divided by the median

    def as_json(self) -> dict[str, Any]:
        layout = self.candidate.layout
        return {
            "replicas": layout.replicas,
            "cores_per_replica": layout.cores,
            "streams": layout.streams,
            "threads_per_stream": layout.threads,
            "batch_sizes": list(self.candidate.batch_sizes),
            "clients": self.clients,
            "images_per_s": round(self.throughput, 2),
            "p50_ms": round(self.p50_ms, 2),
            "p99_ms": round(self.p99_ms, 2),
            "num_runs": self.num_runs,
            "spread": round(self.spread, 3),
        }


def front(points: Sequence[Point]) -> list[Point]:
    """Return the Pareto front, slowest first: no point has more throughput at as low a p99."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda p: (-p.throughput, p.p99_ms)):
        if not kept or point.p99_ms < kept[-1].p99_ms:
            kept.append(point)
    return kept[::-1]


def is_near_front(point: Point, points: Sequence[Point], slack: float) -> bool:
    """Whether no other point is better by more than ``slack`` (a fraction) in both."""
    return not any(
        other.throughput > point.throughput * (1 + slack)
        and other.p99_ms * (1 + slack) < point.p99_ms
        for other in points
    )


def recommended(points: Sequence[Point], p99_ms: float | None = None) -> Point | None:
    """Return the recommended point; None if no p99 is within ``p99_ms`` (None: no limit).

    Of the points within 3 % of the highest throughput it is the one with least memory: fewer
    replicas, then fewer and smaller batch sizes, then the lowest p99.
    """
    allowed = [p for p in points if p99_ms is None or p.p99_ms <= p99_ms]
    if not allowed:
        return None
    enough = NEARLY * max(p.throughput for p in allowed)
    return min((p for p in allowed if p.throughput >= enough), key=_cost)


def _cost(point: Point) -> tuple[int, int, int, float]:
    sizes = point.candidate.batch_sizes
    return point.candidate.layout.replicas, len(sizes), max(sizes), point.p99_ms
