"""Results of one load test: every request's times and outcome, and their summary."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Sample:
    """One request; times in s from the run's start. ``error`` is its kind, such as ``http_429``."""

    scheduled: float  # when it should have been sent; in a closed loop, when it was
    finished: float
    error: str | None = None

    @property
    def latency_ms(self) -> float:
        """From the scheduled time: waiting for the load generator counts as well."""
        return (self.finished - self.scheduled) * 1e3


@dataclass
class Run:
    """A finished run; the warm-up is not in it."""

    kind: str  # closed or open
    offered: float  # clients, or requests/s
    duration_s: float
    samples: list[Sample] = field(default_factory=list)
    client_cpu_s: float = 0.0  # of the load generator, over the run
    service_cpu_s: dict[str, float] | None = None  # by stage; None: not on this machine
    files_per_request: int = 1


@dataclass(frozen=True)
class Summary:
    """The figures of a run; latencies in ms, of the requests that were answered 200."""

    kind: str
    offered: float
    duration_s: float
    num_requests: int
    num_ok: int
    throughput: float  # requests answered 200, per s
    images_per_s: float  # in them
    goodput: float  # of those, within the objective, per s
    p50_ms: float | None
    p90_ms: float | None
    p99_ms: float | None
    max_ms: float | None
    errors: dict[str, int]
    client_cpu_ms: float  # per request, of the load generator
    service_cpu_ms: float | None  # per image, of the service's whole process tree
    service_cpu_ms_by_stage: dict[
        str, float
    ]  # the same, by deployment; HAProxy and Ray beside them
    is_saturated: bool  # an open loop whose answers fell behind what was offered

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def summarise(run: Run, objective_ms: float) -> Summary:
    """Make the figures of a run; goodput counts what came within ``objective_ms``."""
    latencies = np.array([s.latency_ms for s in run.samples if s.error is None])
    num_ok = len(latencies)
    shown: list[float | None] = [None] * len(PERCENTILES)
    if num_ok:
        shown = [round(float(v), 2) for v in np.percentile(latencies, PERCENTILES)]
    p50, p90, p99 = shown
    service_ms: dict[str, float] = {}
    if run.service_cpu_s is not None and num_ok:
        num_images = num_ok * run.files_per_request
        service_ms = {s: round(v / num_images * 1e3, 2) for s, v in run.service_cpu_s.items()}
    throughput = num_ok / run.duration_s
    return Summary(
        kind=run.kind,
        offered=run.offered,
        duration_s=round(run.duration_s, 2),
        num_requests=len(run.samples),
        num_ok=num_ok,
        throughput=round(throughput, 2),
        images_per_s=round(throughput * run.files_per_request, 2),
        goodput=round(float((latencies <= objective_ms).sum()) / run.duration_s, 2),
        p50_ms=p50,
        p90_ms=p90,
        p99_ms=p99,
        max_ms=round(float(latencies.max()), 2) if num_ok else None,
        errors=dict(Counter(s.error for s in run.samples if s.error is not None).most_common()),
        client_cpu_ms=round(run.client_cpu_s / max(1, len(run.samples)) * 1e3, 3),
        service_cpu_ms=round(sum(service_ms.values()), 2) if service_ms else None,
        service_cpu_ms_by_stage=service_ms,
        is_saturated=run.kind == "open" and throughput < 0.95 * run.offered,
    )
