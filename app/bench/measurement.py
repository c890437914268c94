"""Results of a load test: the outcome of every request, the summary, and the service's CPU time."""

import math
from collections import Counter
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
import psutil

PERCENTILES = (50, 90, 99)
MAX_BEHIND = 0.05  # of an open loop: share of failed requests, or added latency in s per s
KEPT_SHARE = 0.99  # of the requests, to be within the objective
PORTS = {"http": 80, "https": 443}  # of URLs that name none
LOCAL = {"127.0.0.1", "localhost", "::1"}
REPLICA = "ray::ServeReplica:"  # the title of a replica's process: ray::ServeReplica:tandem:Decoder


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """A request; times in s from the run's start. ``error`` is its kind, as ``http_429``."""

    scheduled: float  # in a closed loop, when it was sent
    finished: float
    error: str | None = None
    answer: tuple[int, bytes] | None = None  # the request's number and the body, if they are kept

    @property
    def latency_ms(self) -> float:
        """From the scheduled time, so waiting for the load generator counts too."""
        return (self.finished - self.scheduled) * 1e3


@dataclass
class Run:
    """A finished run, without its warm-up."""

    kind: str  # closed or open
    offered: float  # clients, or requests/s
    duration_s: float  # in which requests were sent; the last answers came later
    samples: list[TimedRequest] = field(default_factory=list)
    client_cpu_s: float = 0.0  # of the load generator, over the run
    began_s: float = 0.0  # the time of the samples at which ``duration_s`` began
    service_cpu_s: dict[str, float] | None = None  # by stage; None: the service is elsewhere
    files_per_request: int = 1


@dataclass(frozen=True)
class Summary:
    """The figures of a run; latencies in ms, of the requests that were answered 200."""

    kind: str
    offered: float
    duration_s: float
    num_requests: int
    num_ok: int
    num_good: int  # answered 200 within the objective
    throughput: float  # requests answered 200 during the load, per s
    images_per_s: float  # images in those requests
    goodput: float  # those requests within the objective, per s
    p50_ms: float | None
    p90_ms: float | None
    p99_ms: float | None
    max_ms: float | None
    errors: dict[str, int]
    client_cpu_ms: float  # per request, of the load generator
    service_cpu_ms: float | None  # per image, of the service's whole process tree
    # The same by deployment, and for HAProxy and Ray.
    service_cpu_ms_by_stage: dict[str, float]
    is_saturated: bool  # an open loop offered more than the service could answer


def summarise(run: Run, objective_ms: float) -> Summary:
    """Compute the figures of a run; goodput counts the answers within ``objective_ms``."""
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
    shares = _shares_within(run)
    throughput = float(shares.sum()) / run.duration_s
    return Summary(
        kind=run.kind,
        offered=run.offered,
        duration_s=round(run.duration_s, 2),
        num_requests=len(run.samples),
        num_ok=num_ok,
        num_good=int((latencies <= objective_ms).sum()),
        throughput=round(throughput, 2),
        images_per_s=round(throughput * run.files_per_request, 2),
        goodput=round(float(shares[latencies <= objective_ms].sum()) / run.duration_s, 2),
        p50_ms=p50,
        p90_ms=p90,
        p99_ms=p99,
        max_ms=round(float(latencies.max()), 2) if num_ok else None,
        errors=dict(Counter(s.error for s in run.samples if s.error is not None).most_common()),
        client_cpu_ms=round(run.client_cpu_s / max(1, len(run.samples)) * 1e3, 3),
        service_cpu_ms=round(sum(service_ms.values()), 2) if service_ms else None,
        service_cpu_ms_by_stage=service_ms,
        is_saturated=run.kind == "open" and _is_saturated(run, num_ok),
    )


def _shares_within(run: Run) -> npt.NDArray[np.float64]:
    """Return for each answered request the share of it that falls into the run's time.

    Later answers do not count, since one straggler would lower the rate of all. A client of a
    closed loop works on one request at any time, so its last request counts by the time spent on
    it.
    """
    answered = [s for s in run.samples if s.error is None]
    began = np.array([s.scheduled for s in answered])
    ended = np.array([s.finished for s in answered])
    until = run.began_s + run.duration_s
    if run.kind == "open":
        return (ended <= until).astype(np.float64)
    return np.asarray(np.clip((until - began) / np.maximum(ended - began, 1e-9), 0, 1))


def _is_saturated(run: Run, num_ok: int) -> bool:
    """Whether too many requests of an open loop failed, or latency kept growing.

    The number of answers is no criterion: a Poisson process varies by its square root, and so does
    the backlog of a service that keeps up at the end of a short run.
    """
    if num_ok < (1 - MAX_BEHIND) * len(run.samples):
        return True
    answered = sorted((s.scheduled, s.finished - s.scheduled) for s in run.samples if not s.error)
    if not (quarter := len(answered) // 4):
        return False
    parts = answered[:quarter], answered[-quarter:]
    (began, early_s), (ended, late_s) = (np.median(part, axis=0) for part in parts)
    behind = MAX_BEHIND + 1 / math.sqrt(len(answered))
    return bool(late_s - early_s > behind * (ended - began))


def knee(summaries: list[Summary]) -> float | None:
    """Return the highest offered rate that the service keeps up with, as with all lower rates.

    The service keeps up if 99 of 100 requests are answered 200 within the objective. Refused and
    failed requests count as late ones.
    """
    highest = None
    for s in sorted((s for s in summaries if s.kind == "open"), key=lambda s: s.offered):
        if s.is_saturated or s.num_good < KEPT_SHARE * max(1, s.num_requests):
            break
        highest = s.offered
    return highest


def service_root(url: str) -> psutil.Process | None:
    """Return the root process of the service, ``tandem serve``, if it runs on this machine.

    It is an ancestor of the process that listens on the port. None if the service runs elsewhere,
    or was started in another way.
    """
    parts = urlsplit(url)
    if parts.hostname not in LOCAL:
        return None
    port = parts.port or PORTS.get(parts.scheme)
    try:
        for connection in psutil.net_connections("tcp"):
            address = connection.laddr
            if connection.status != psutil.CONN_LISTEN or not address or not connection.pid:
                continue
            if address.port == port:
                process = psutil.Process(connection.pid)
                for ancestor in (process, *process.parents()):
                    words = ancestor.cmdline()
                    if any(word.endswith("tandem") for word in words) and "serve" in words:
                        return ancestor
                return None
    except psutil.Error:
        return None
    return None


def cpu_seconds(root: psutil.Process) -> dict[str, float]:
    """Return the CPU time so far, user and system, of ``root`` and its descendants, by stage.

    It is empty if ``root`` has ended.
    """
    try:
        processes = (root, *root.children(recursive=True))
    except psutil.Error:
        return {}
    total: dict[str, float] = {}
    for process in processes:
        try:
            times, words = process.cpu_times(), process.cmdline()
        except psutil.Error:
            continue
        stage = stage_of(words)
        total[stage] = total.get(stage, 0.0) + times.user + times.system
    return total


def stage_of(command_line: list[str]) -> str:
    """Return the deployment of a replica's process, HAProxy, or "Ray" for the rest."""
    first = command_line[0] if command_line else ""
    if first.startswith(REPLICA):  # while a method runs, its name follows the deployment's
        return first.rsplit(":", 1)[-1].partition(".")[0]
    return "HAProxy" if first.rsplit("/", 1)[-1] == "haproxy" else "Ray"
