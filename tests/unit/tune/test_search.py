"""The search, on a machine made in code: it is told what is good, and must find it in noise."""

import re
from collections import Counter

import numpy as np
import pytest

from app.tune.candidates import Candidate, ReplicaLayout, candidates, client_counts
from app.tune.pareto import RunResult, recommended
from app.tune.search import NUM_ROUNDS, NUM_SHORT, Search, full_round, survivors


class Machine:
    """Streams give throughput, threads a lone image's speed; batches of four help, more do not."""

    def __init__(self, noise: float = 0.0, seed: int = 0, room: int = 100) -> None:
        self.asked: list[tuple[Candidate, int, float]] = []
        self._noise, self._rng, self._room = noise, np.random.default_rng(seed), room

    def measure(self, candidate: Candidate, clients: int, seconds: float) -> RunResult | None:
        self.asked.append((candidate, clients, seconds))
        layout = candidate.layout
        if layout.replicas > self._room:
            return None
        alone_ms = 40 / layout.threads**0.7
        batching = 1 + 0.3 * (max(candidate.reachable(clients)) >= 4)
        most = layout.replicas * layout.streams * batching / alone_ms * 1e3
        rate = min(most, clients / alone_ms * 1e3) * self._wavering()
        return RunResult(rate, clients / rate * 1e3, clients / rate * 1.5e3 * self._wavering())

    def _wavering(self) -> float:
        return float(np.exp(self._noise * self._rng.normal()))


def search(machine: Machine, cores: int) -> Search:
    return Search(candidates(cores), cores, machine.measure, 1.0)


@pytest.mark.parametrize("cores", [1, 2, 4, 8, 12, 32])
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_it_finds_what_is_nearly_the_best(cores, noise):
    points = search(Machine(noise, seed=cores), cores).run()
    best = cores * 1.3 / 40 * 1e3  # one stream on every core, batches of four or more
    chosen = recommended(points)
    truly = Machine().measure(chosen.candidate, chosen.clients, 1.0)
    assert truly.throughput > 0.9 * best


def test_the_low_end_is_there_too():
    points = search(Machine(), 8).run()
    lowest = min(points, key=lambda p: p.p99_ms)
    assert lowest.candidate.layout.threads == 8
    assert lowest.clients == 1


@pytest.mark.parametrize("cores", [1, 2, 6, 32, 96])
def test_runs_are_few_and_the_first_are_short(cores):
    machine = Machine(0.1)
    points = search(machine, cores).run()
    short = [run for run in machine.asked if run[2] < 1.0]
    assert machine.asked[: len(short)] == short
    assert len(short) <= NUM_SHORT * (24 + 12)
    assert len(machine.asked) - len(short) <= NUM_ROUNDS * 7 * len(client_counts(cores))
    assert all(1 <= p.num_runs <= NUM_ROUNDS for p in points)


def test_points_are_medians_of_rounds():
    rates = iter([10.0, 500.0, 20.0])

    def measure(candidate: Candidate, clients: int, seconds: float) -> RunResult:
        is_short = seconds < 1.0
        rate = 1.0 if is_short or clients > 1 else next(rates)
        return RunResult(rate, 5.0, 5.0)

    points = Search([Candidate(ReplicaLayout(1, 1, 1), (1,))], 1, measure, 1.0).run()
    alone = next(p for p in points if p.clients == 1)
    assert alone.throughput == 20.0
    assert alone.spread == pytest.approx(490 / 20)


def test_who_is_far_from_the_front_after_one_round_is_forgotten():
    fast, slow = (Candidate(ReplicaLayout(1, 2, streams), (1,)) for streams in (2, 1))
    asked: Counter[Candidate] = Counter()

    def measure(candidate: Candidate, clients: int, seconds: float) -> RunResult:
        is_short = seconds < 1.0  # there both look alike
        asked[candidate] += not is_short
        worse = 2.0 if candidate == slow and not is_short else 1.0
        return RunResult(100 / worse, 10 * worse, 20 * worse)

    points = Search([fast, slow], 2, measure, 1.0).run()
    assert {p.candidate for p in points} == {fast}
    assert asked == {fast: NUM_ROUNDS * 6, slow: 6}


def test_what_does_not_fit_into_memory_is_left_out():
    machine = Machine(room=1)
    found = search(machine, 4)
    points = found.run()
    assert {layout.replicas for layout in found.left_out} == {2, 4}
    assert {p.candidate.layout.replicas for p in points} == {1}
    assert (
        max(Counter(c.layout for c, _, _ in machine.asked if c.layout.replicas > 1).values()) == 1
    )


def test_nothing_fits():
    assert search(Machine(room=0), 2).run() == []


def test_steps_count_up_to_the_end():
    lines: list[str] = []
    machine = Machine()
    Search(candidates(2), 2, machine.measure, 10.0, lines.append).run()
    steps = [
        re.findall(r"^(\d+) of (\d+), (\d+) s left: (.*); (\d+) clients$", s)[0] for s in lines
    ]
    numbers = [int(step[0]) for step in steps]
    assert numbers == list(range(1, len(steps) + 1))
    assert all(number <= int(step[1]) for number, step in zip(numbers, steps, strict=True))
    assert int(steps[-1][1]) == numbers[-1]
    assert int(steps[-1][2]) == 10
    assert all(int(step[2]) > 0 for step in steps)
    asked = [(str(candidate), str(clients)) for candidate, clients, _ in machine.asked]
    assert [(step[3], step[4]) for step in steps] == asked


def test_who_goes_on():
    fast, slow = ReplicaLayout(1, 4, 1), ReplicaLayout(1, 4, 4)
    rates = {Candidate(slow, (n,)): 100.0 - n for n in range(1, 30)}
    rates |= {Candidate(fast, (1,)): 20.0, Candidate(fast, (2,)): 30.0}
    kept = survivors(rates, {fast: 10.0, slow: 40.0})
    assert Candidate(fast, (2,)) in kept
    assert Candidate(fast, (1,)) not in kept
    assert [c for c in kept if c.layout == slow] == [Candidate(slow, (n,)) for n in range(1, 7)]


def test_a_lone_client_is_not_measured_once_for_each_batch_size():
    plan = full_round(candidates(2), [1, 2, 16])
    assert Counter(n for _, n in plan) == {1: 3, 2: 3, 16: 11}  # two replicas: 8 clients each
