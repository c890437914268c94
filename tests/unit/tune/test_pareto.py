"""The front and the choice."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from app.tune.pareto import front, is_near_front, recommended
from tests.support.points import point

figures = st.floats(0.1, 1e4)
some_points = st.lists(st.builds(point, figures, figures), min_size=1, max_size=30)


def is_better(one, other) -> bool:
    return one.throughput > other.throughput and one.p99_ms < other.p99_ms


@given(some_points)
def test_nothing_is_better_than_a_point_of_the_front(points):
    best = front(points)
    assert best
    assert not any(is_better(other, one) for one in best for other in points)


@given(some_points)
def test_for_each_point_the_front_has_one_as_good(points):
    best = front(points)
    for one in points:
        assert any(b.throughput >= one.throughput and b.p99_ms <= one.p99_ms for b in best)


@given(some_points)
def test_the_front_rises_in_both(points):
    best = front(points)
    for before, after in itertools.pairwise(best):
        assert before.throughput < after.throughput
        assert before.p99_ms < after.p99_ms


@given(some_points, st.none() | figures)
def test_the_choice_keeps_the_p99_and_nearly_the_best_throughput(points, p99_ms):
    allowed = [p for p in points if p99_ms is None or p.p99_ms <= p99_ms]
    chosen = recommended(points, p99_ms)
    if not allowed:
        assert chosen is None
        return
    assert chosen in allowed
    assert chosen.throughput >= 0.97 * max(p.throughput for p in allowed)


def test_within_three_percent_the_one_that_needs_least_memory():
    fastest = point(100, 50, replicas=2, cores=1)
    fewer_replicas = point(98, 60, sizes=(1, 2, 4, 8))
    smaller_batches = point(97.5, 70, sizes=(1, 2, 4))
    fewer_clients = point(97.5, 40, sizes=(1, 2, 4), clients=4)
    too_slow = point(96, 10, sizes=(1,))
    points = [fastest, fewer_replicas, too_slow]
    assert recommended(points) == fewer_replicas
    assert recommended([*points, smaller_batches]) == smaller_batches
    assert recommended([*points, smaller_batches, fewer_clients]) == fewer_clients


def test_a_p99_that_nothing_keeps():
    assert recommended([point(100, 50), point(10, 20)], 19.9) is None


def test_near_the_front():
    best, near, far = point(100, 10), point(90, 11), point(50, 20)
    assert is_near_front(best, [best, near, far], 0.15)
    assert is_near_front(near, [best, near, far], 0.15)
    assert not is_near_front(far, [best, near, far], 0.15)
    assert is_near_front(far, [near, far], 1.0)
