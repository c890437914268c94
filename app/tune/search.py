"""Successive halving: a short round of all candidates, then repeated rounds of the best.

Most candidates are far from good, and a short run shows it. Nothing here knows of processes: the
function that measures is passed in.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median

from app.tune.candidates import Candidate, ReplicaLayout, client_counts
from app.tune.pareto import Point, RunResult, is_near_front

NUM_ROUNDS = 3
MAX_KEPT = 6  # after the short round, beside the layout that is fastest for a lone client
NUM_SHORT = 2  # times each candidate is measured in it; the better counts: noise only slows down
FAR = 0.85  # of the best throughput in the short round; below it a candidate is dropped
SLACK = 0.15  # from the front after the first full round, likewise
HIGH_LOAD = 8  # clients a core in the short round
SHORT = 0.5  # of a run's time

Measure = Callable[[Candidate, int, float], RunResult | None]  # None: no room in memory for it


@dataclass(frozen=True)
class SearchStep:
    """What is about to be measured."""

    candidate: Candidate
    clients: int
    number: int  # from 1
    of: int  # as planned now; it shrinks when candidates are dropped
    left_s: float  # of measuring, this step included; starting processes is not in it


ReportProgress = Callable[[SearchStep], None]
Schedule = list[tuple[Candidate, int]]


class Search:
    """One search; ``measure`` runs a candidate under a number of clients for some seconds."""

    def __init__(
        self,
        tried: Sequence[Candidate],
        cores: int,
        measure: Measure,
        seconds: float,
        report: ReportProgress = lambda _: None,
    ) -> None:
        self._tried, self._cores, self._measure = tried, cores, measure
        self._seconds, self._report = seconds, report
        self._number = 0
        self._runs: dict[tuple[Candidate, int], list[RunResult]] = {}
        self.left_out: list[ReplicaLayout] = []  # no room in memory

    def run(self) -> list[Point]:
        """Search; return the points of who was in every round. Empty: nothing fits into memory."""
        kept = self._short_round()
        for number in range(NUM_ROUNDS):
            plan = full_round(kept, client_counts(self._cores))
            self._go(plan, self._seconds, NUM_ROUNDS - number)
            if number == 0:
                points = self._points()
                near = {p.candidate for p in points if is_near_front(p, points, SLACK)}
                # The others' points go: one run in a quiet moment would beat medians of several.
                self._runs = {key: runs for key, runs in self._runs.items() if key[0] in near}
                kept = [candidate for candidate in kept if candidate in near]
        return self._points()

    def _short_round(self) -> list[Candidate]:
        high = HIGH_LOAD * self._cores
        plan = []
        for _, group in groupby(sorted(self._tried), key=lambda c: c.layout):
            of_layout = list(group)
            plan += [(of_layout[0], 1), *((candidate, high) for candidate in of_layout)]
        for number in range(NUM_SHORT):
            self._go(plan, SHORT * self._seconds, NUM_SHORT - number)
        found = self._runs.items()
        alone = {c.layout: min(r.p50_ms for r in runs) for (c, n), runs in found if n == 1}
        rates = {c: max(r.throughput for r in runs) for (c, n), runs in found if n == high}
        self._runs.clear()
        return survivors(rates, alone)

    def _go(self, plan: Schedule, seconds: float, times: int = 1) -> None:
        """Measure a plan once; ``times`` it will be measured from here on, by what is known now."""
        planned = self._number + times * len(plan)
        for candidate, clients in plan:
            if candidate.layout in self.left_out:
                continue
            self._number += 1
            left_s = (planned - self._number + 1) * seconds
            self._report(SearchStep(candidate, clients, self._number, planned, left_s))
            sample = self._measure(candidate, clients, seconds)
            if sample is None:
                self.left_out.append(candidate.layout)
            else:
                self._runs.setdefault((candidate, clients), []).append(sample)

    def _points(self) -> list[Point]:
        return [_point(*key, runs) for key, runs in self._runs.items()]


def _point(candidate: Candidate, clients: int, runs: Sequence[RunResult]) -> Point:
    rates = [run.throughput for run in runs]
    return Point(
        candidate,
        clients,
        median(rates),
        median(run.p50_ms for run in runs),
        median(run.p99_ms for run in runs),
        len(runs),
        (max(rates) - min(rates)) / median(rates),
    )


def survivors(rates: dict[Candidate, float], alone: dict[ReplicaLayout, float]) -> list[Candidate]:
    """Return who goes on: those near the best throughput, and the best of the fastest layout.

    ``rates`` are images/s at the high load, ``alone`` the median ms of a lone client by layout: the
    low end of the front is there, however little throughput it gives.
    """
    ranked = sorted(rates, key=lambda c: -rates[c])
    kept = [c for c in ranked if rates[c] >= FAR * rates[ranked[0]]][:MAX_KEPT]
    if alone:
        fastest = min(alone, key=lambda layout: alone[layout])
        best_of_it = next((c for c in ranked if c.layout == fastest), None)
        if best_of_it is not None and best_of_it not in kept:
            kept.append(best_of_it)
    return sorted(kept)


def full_round(kept: Sequence[Candidate], counts: Sequence[int]) -> Schedule:
    """Return one round: layout by layout, as memory may not hold all, loads and sizes in turns."""
    return [
        (candidate, clients)
        for _, group in groupby(sorted(kept), key=lambda c: c.layout)
        for candidate, clients in _of_layout(list(group), counts)
    ]


def _of_layout(
    group: Sequence[Candidate], counts: Sequence[int]
) -> Iterator[tuple[Candidate, int]]:
    """Yield a layout's runs, but not those that batches too large to be filled would repeat."""
    for clients in counts:
        seen = set()
        for candidate in group:
            reachable = candidate.reachable(clients)
            if reachable not in seen:
                seen.add(reachable)
                yield candidate, clients
