"""Successive halving: a short round of all candidates, then repeated rounds of the best.

Most candidates are far from good, and a short run shows it. This module does not start processes:
the function that measures is passed in.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from statistics import median

from app.tune.candidates import Candidate, ReplicaLayout, client_counts
from app.tune.pareto import Point, RunResult, is_near_front

NUM_ROUNDS = 3
MAX_KEPT = 6  # after the short round, in addition to the layout that is fastest for a lone client
NUM_SHORT = 2  # measurements of each candidate in it; the better counts, as noise slows
FAR = 0.85  # of the best throughput in the short round; candidates below are dropped
SLACK = 0.15  # the same for the distance from the front, after the first full round
HIGH_LOAD = 8  # clients per core in the short round
SHORT = 0.5  # of the time of a run

Measure = Callable[[Candidate, int, float], RunResult | None]  # None: not enough memory or cores


ReportProgress = Callable[[str], None]
Schedule = list[tuple[Candidate, int]]


class Search:
    """A search; ``measure`` runs a candidate with a number of clients for some seconds."""

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
        self.left_out: list[ReplicaLayout] = []  # for which memory or cores did not suffice

    def run(self) -> list[Point]:
        """Search; return the points of candidates in every round.

        The list is empty if nothing fits into memory.
        """
        kept = self._short_round()
        for number in range(NUM_ROUNDS):
            plan = full_round(kept, client_counts(self._cores))
            self._go(plan, self._seconds, NUM_ROUNDS - number)
            if number == 0:
                points = self._points()
                near = {p.candidate for p in points if is_near_front(p, points, SLACK)}
                # Points of dropped candidates go: a single run in a quiet moment could beat others'
                # medians.
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
        measured = self._runs.items()
        alone = {c.layout: min(r.p50_ms for r in runs) for (c, n), runs in measured if n == 1}
        rates = {c: max(r.throughput for r in runs) for (c, n), runs in measured if n == high}
        self._runs.clear()
        return survivors(rates, alone)

    def _go(self, plan: Schedule, seconds: float, times: int = 1) -> None:
        """Measure a plan once; ``times`` is how often it is still planned, for the progress."""
        planned = self._number + times * len(plan)
        for candidate, clients in plan:
            if candidate.layout in self.left_out:
                continue
            self._number += 1
            left_s = (planned - self._number + 1) * seconds  # without starting processes
            steps = f"{self._number} of {planned}, {left_s:.0f} s left"
            self._report(f"{steps}: {candidate}; {clients} clients")
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
    """Return the candidates that stay: near the best throughput, or the best of the fastest layout.

    Args:
        rates: images/s at the high load, by candidate.
        alone: median ms of a lone client, by layout. Its fastest stays, whatever its throughput, as
            the low end of the front.

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
    """Return a round of measurements, with loads and sizes alternating in each layout.

    Layouts come one after another, since memory may not hold all.
    """
    return [
        (candidate, clients)
        for _, group in groupby(sorted(kept), key=lambda c: c.layout)
        for candidate, clients in _of_layout(list(group), counts)
    ]


def _of_layout(
    group: Sequence[Candidate], counts: Sequence[int]
) -> Iterator[tuple[Candidate, int]]:
    """Yield a layout's runs, without those whose larger batch sizes could not be filled."""
    for clients in counts:
        seen = set()
        for candidate in group:
            reachable = candidate.reachable(clients)
            if reachable not in seen:
                seen.add(reachable)
                yield candidate, clients
