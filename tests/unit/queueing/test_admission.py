"""Who is let in: the limit, the pace, and when the others are told to come back."""

from contextlib import ExitStack

import pytest

from app.errors import OverloadedError
from app.queueing.admission import ALWAYS, MAX_RETRY_AFTER_S, Admission
from app.queueing.concurrency_limit import ConcurrencyLimit, Room
from tests.support.hand_clock import HandClock


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


def admission_at(clock: HandClock, each_s: float, max_requests: int = 100) -> Admission:
    """Return one that knows how long a request takes."""
    admission = Admission(max_requests, clock)
    for _ in range(500):
        with admission.admit():
            clock.now += each_s
    return admission


def test_the_limit(clock):
    admission = Admission(2, clock)
    with admission.admit(), admission.admit():
        assert admission.num_under_way == 2
        with pytest.raises(OverloadedError, match="2 requests are under way, the limit"):
            admission.admit().__enter__()
    with pytest.raises(RuntimeError), admission.admit():
        raise RuntimeError("a request that fails gives its place back too")
    assert admission.num_under_way == 0


def test_who_would_be_too_late_is_refused_at_once(clock):
    admission = admission_at(clock, each_s=0.1)
    with ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(admission.admit())
        with pytest.raises(OverloadedError, match=r"take 4\.0 s, more than the 3 s") as caught:
            admission.admit(3.0).__enter__()
        assert caught.value.retry_after_s == 2
        with admission.admit(5.0):
            pass


def test_some_are_always_let_in(clock):
    admission = admission_at(clock, each_s=1.5)
    with ExitStack() as stack:
        for _ in range(ALWAYS):
            stack.enter_context(admission.admit(1.0))
        with pytest.raises(OverloadedError):
            admission.admit(1.0).__enter__()


def test_nobody_is_told_to_stay_away_for_ever(clock):
    admission = admission_at(clock, each_s=1.5)
    with ExitStack() as stack:
        for _ in range(90):
            stack.enter_context(admission.admit())
        with pytest.raises(OverloadedError) as caught:
            admission.admit(1.0).__enter__()
    assert caught.value.retry_after_s == MAX_RETRY_AFTER_S


def test_a_refusal_survives_its_way_through_another_process():
    import pickle

    error = pickle.loads(pickle.dumps(OverloadedError("full", 7)))
    assert (error.message, error.retry_after_s) == ("full", 7)
    assert OverloadedError("full").retry_after_s == 1


def test_under_overload_fewer_are_let_in(clock):
    limit = ConcurrencyLimit(100, Room(num_cores=2, max_batch_size=8, target_wait_s=0.05))
    admission = Admission(100, clock, limit=limit)
    with ExitStack() as others, ExitStack() as first:
        for _ in range(30):
            first.enter_context(admission.admit())
        for _ in range(70):
            others.enter_context(admission.admit())
        with pytest.raises(OverloadedError) as caught:
            admission.admit().__enter__()
        assert caught.value.limit is None  # the places are the settings'
        clock.now += 0.3
        first.close()  # 100/s
        for _ in range(30):
            first.enter_context(admission.admit())
        with pytest.raises(OverloadedError):
            admission.admit().__enter__()
        with pytest.raises(OverloadedError, match="100 requests are under way, the lim") as caught:
            admission.admit().__enter__()
        assert caught.value.limit == 21
        others.close()
        with pytest.raises(OverloadedError):
            admission.admit().__enter__()
        first.close()
        with ExitStack() as few:
            for _ in range(21):
                few.enter_context(admission.admit())
            with pytest.raises(OverloadedError):
                admission.admit().__enter__()


def test_what_haproxy_refused_counts_as_refused_here(clock):
    refused = []
    admission = Admission(100, clock, refused.append)
    admission.refused_before(30)
    assert refused == [30]
