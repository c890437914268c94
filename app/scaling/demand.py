"""Computes arrival rate, backlog and cost per image from the replicas' usage reports.

Pure like the policy. A report's times are its replica's own: no two clocks are compared.
"""

import math
from collections import deque
from collections.abc import Hashable, Mapping, Sequence

from app.scaling.policy import SIGMAS, Demand
from app.scaling.usage import UsageReport

UsageReports = Mapping[Hashable, Sequence[UsageReport]]  # by replica, oldest first

# A rate is counted over the shortest of these that has enough arrivals: a step shows soon, and few
# images a second are not taken for a change.
WINDOWS_S = (5.0, 10.0, 20.0, 40.0)
ENOUGH_ARRIVALS = 400  # a standard deviation of 5 %
ENOUGH_DONE = 50
COST_WINDOW_S = 20.0
# Below this, what Ray's loops use in a process would count as the images' cost.
BUSY_CORES = 0.3  # of a replica


class StageMeter:
    """One stage: the last reports of each of its replicas."""

    def __init__(self) -> None:
        self._of: dict[Hashable, deque[UsageReport]] = {}
        self._cpu_ms: float | None = None

    def update(self, reports: UsageReports) -> None:
        """Add the reports that are new; replicas that have none any more are forgotten."""
        self._of = {replica: self._of.get(replica, deque()) for replica in reports}
        for replica, found in reports.items():
            kept = self._of[replica]
            last = kept[-1].at if kept else float("-inf")
            kept.extend(report for report in found if report.at > last)
            while len(kept) > 2 and kept[-1].at - kept[1].at >= WINDOWS_S[-1]:
                kept.popleft()

    @property
    def latest(self) -> list[UsageReport]:
        """The last report of each replica."""
        return [kept[-1] for kept in self._of.values() if kept]

    @property
    def is_measured(self) -> bool:
        """Whether a replica has reported twice, so that a rate can be told."""
        return any(len(kept) > 1 for kept in self._of.values())

    @property
    def backlog(self) -> float:
        """Images under way."""
        return sum(report.images_waiting for report in self.latest)

    @property
    def cores(self) -> float:
        """What one replica can use, at least."""
        return min((report.cores for report in self.latest), default=0.0)

    def demand(self) -> Demand:
        """Return what arrives."""
        longest = self._rate(WINDOWS_S[-1])
        for window_s in WINDOWS_S:
            rate = self._rate(window_s)
            # A short window that has too few to be sure may still contradict the longest one.
            noise = SIGMAS * math.sqrt(max(longest * window_s, 1.0))
            if rate * window_s >= ENOUGH_ARRIVALS or abs(rate - longest) * window_s > noise:
                break
        return Demand(rate, window_s, self.backlog)

    def _rate(self, window_s: float) -> float:
        return sum(
            (last.images_arrived - first.images_arrived) / (last.at - first.at)
            for first, last in self._spans(window_s)
        )

    def cpu_ms(self) -> float | None:
        """Return the CPU-ms of an image when enough was last done to tell; None before that."""
        spans = self._spans(COST_WINDOW_S)
        used_ms = sum(last.cpu_ms - first.cpu_ms for first, last in spans)
        time_s = sum(last.at - first.at for first, last in spans)
        num_done = sum(last.images_done - first.images_done for first, last in spans)
        if used_ms > BUSY_CORES * 1e3 * time_s and num_done >= ENOUGH_DONE:
            self._cpu_ms = used_ms / num_done
        return self._cpu_ms

    def expected_cpu_ms(self) -> float | None:
        """Return what the replicas expect of an image; None before one has reported."""
        return max((report.expected_cpu_ms for report in self.latest), default=None)

    def _spans(self, window_s: float) -> list[tuple[UsageReport, UsageReport]]:
        """Return for each replica the reports that bound its last ``window_s``, as far as known."""
        spans = []
        for kept in self._of.values():
            if len(kept) > 1:
                since = kept[-1].at - window_s - 1e-6
                first = next(report for report in kept if report.at >= since)
                spans.append((first if first is not kept[-1] else kept[-2], kept[-1]))
        return spans


def demand(meters: Mapping[str, StageMeter]) -> Demand | None:
    """Return what arrives where most does: the Gateway, which knows of refused images too.

    None before anything is measured. A Gateway that does not scale does not report; then the stage
    behind it tells.
    """
    found = [meter.demand() for meter in meters.values() if meter.is_measured]
    return max(found, key=lambda demand: demand.rate, default=None)
