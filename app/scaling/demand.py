"""Computes arrival rate, backlog and cost per image from the replicas' usage reports.

Pure like the policy, and time is passed in. A report's times are its replica's own: no two clocks
are compared.
"""

import math
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from app.scaling.policy import SIGMAS, Demand
from app.scaling.usage import UsageReport

UsageReports = Mapping[Hashable, Sequence[UsageReport]]  # by replica, oldest first

# A rate is counted over the shortest of these that has enough arrivals: a step shows soon, and few
# images a second are not taken for a change.
WINDOWS_S = (5.0, 10.0, 20.0, 40.0)
ENOUGH_ARRIVALS = 400  # a standard deviation of 5 %
ENOUGH_DONE = 50
COST_WINDOW_S = 20.0
# A replica from which nothing new came for so long hangs: its last rate and backlog count no more.
SILENT_AFTER_S = 5.0
INTERVALS_MISSED = 3.0  # of its reports, if they are so rare that this takes longer
# Below this, what Ray's loops use in a process would count as the images' cost.
BUSY_CORES = 0.3  # of a replica


class StageMeter:
    """One stage: the last reports of each of its replicas."""

    def __init__(self) -> None:
        self._of: dict[Hashable, _Replica] = {}
        self._speaking: list[_Replica] = []  # those that do not hang
        self._cpu_ms: float | None = None

    def update(self, reports: UsageReports, now: float, interval_s: float = 0.0) -> None:
        """Add the reports that are new; replicas that have none any more are forgotten.

        ``now`` is the caller's clock, and replicas report every ``interval_s``.
        """
        self._of = {replica: self._of.get(replica) or _Replica(now) for replica in reports}
        for replica, sent in reports.items():
            self._of[replica].add(sent, now)
        since = now - max(SILENT_AFTER_S, INTERVALS_MISSED * interval_s)
        self._speaking = [replica for replica in self._of.values() if replica.heard_at > since]

    @property
    def latest(self) -> list[UsageReport]:
        """The last report of each replica."""
        return [replica.kept[-1] for replica in self._of.values() if replica.kept]

    @property
    def is_measured(self) -> bool:
        """Whether a replica has reported twice, so that a rate can be computed."""
        return any(len(replica.kept) > 1 for replica in self._speaking)

    @property
    def backlog(self) -> float:
        """Images under way."""
        return sum(r.kept[-1].images_waiting for r in self._speaking if r.kept)

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
        """Return the arrivals of all replicas within one window, over its length.

        A replica that began within it had none before: over its own short time it would have a
        rate as large as that of those which did its share until then.
        """
        spans = self._spans(window_s)
        longest_s = max((span.seconds for span in spans), default=0.0)
        return sum(
            (span.last.images_arrived - span.first.images_arrived)
            / (span.seconds if span.is_whole else longest_s)
            for span in spans
        )

    def cpu_ms(self) -> float | None:
        """Return the CPU-ms of an image when enough was last done to tell; None before that."""
        spans = self._spans(COST_WINDOW_S)
        used_ms = sum(span.last.cpu_ms - span.first.cpu_ms for span in spans)
        time_s = sum(span.seconds for span in spans)
        num_done = sum(span.last.images_done - span.first.images_done for span in spans)
        if used_ms > BUSY_CORES * 1e3 * time_s and num_done >= ENOUGH_DONE:
            self._cpu_ms = used_ms / num_done
        return self._cpu_ms

    def expected_cpu_ms(self) -> float | None:
        """Return what the replicas expect of an image; None before one has reported."""
        return max((report.expected_cpu_ms for report in self.latest), default=None)

    def _spans(self, window_s: float) -> list["_Span"]:
        """Return for each replica the reports that bound its last ``window_s``, as far as known."""
        return [replica.span(window_s) for replica in self._speaking if len(replica.kept) > 1]


class _Span(NamedTuple):
    """Two reports of a replica, and whether it has older ones than the window that they bound."""

    first: UsageReport
    last: UsageReport
    is_whole: bool

    @property
    def seconds(self) -> float:
        return self.last.at - self.first.at


class _Replica:
    """The last reports of one replica, and when, by the caller's clock, the newest came."""

    def __init__(self, now: float) -> None:
        self.kept: deque[UsageReport] = deque()
        self.heard_at = now

    def add(self, reports: Sequence[UsageReport], now: float) -> None:
        """Add those that are new. Of two with one time the first counts."""
        if self.kept and reports and reports[-1].at < self.kept[-1].at:
            self.kept.clear()  # its clock was set back
        for report in reports:
            if not self.kept or report.at > self.kept[-1].at:
                self.kept.append(report)
                self.heard_at = now
        while len(self.kept) > 2 and self.kept[-1].at - self.kept[1].at >= WINDOWS_S[-1]:
            self.kept.popleft()

    def span(self, window_s: float) -> _Span:
        """Return the reports that bound the last ``window_s``; there are two or more."""
        last, since = self.kept[-1], self.kept[-1].at - window_s - 1e-6
        first = next(report for report in self.kept if report.at >= since)
        is_whole = last.at - self.kept[0].at >= window_s - 1e-6
        return _Span(first if first is not last else self.kept[-2], last, is_whole)


def demand(meters: Mapping[str, StageMeter]) -> Demand | None:
    """Return what arrives where most does: the Gateway, which knows of refused images too.

    None before anything is measured. A Gateway that does not scale does not report; then the stage
    behind it tells.
    """
    found = [meter.demand() for meter in meters.values() if meter.is_measured]
    return max(found, key=lambda demand: demand.rate, default=None)
