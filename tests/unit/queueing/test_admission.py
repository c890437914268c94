"""Who is let in: the limit, and the lower one of an overload."""

from contextlib import ExitStack

import pytest

from app.errors import OverloadedError
from app.queueing.admission import Admission
from app.queueing.concurrency_limit import ConcurrencyLimit
from tests.support.hand_clock import HandClock


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


def test_the_limit(clock):
    admission = Admission(2, clock)
    with admission.admit(), admission.admit():
        assert admission.num_under_way == 2
        with pytest.raises(OverloadedError, match="2 requests are under way, the limit"):
            admission.admit().__enter__()
    with pytest.raises(RuntimeError), admission.admit():
        raise RuntimeError("a request that fails gives its place back too")
    assert admission.num_under_way == 0


def test_a_refusal_survives_its_way_through_another_process():
    import pickle

    error = pickle.loads(pickle.dumps(OverloadedError("full", 7)))
    assert (error.message, error.limit) == ("full", 7)
    assert OverloadedError("full").limit is None


def overloaded(clock, *, of_all: bool) -> OverloadedError:
    """Return the refusal of an admission whose limit is on."""
    limit = ConcurrencyLimit(2, num_cores=1, max_batch_size=1, target_wait_s=0.0)
    limit.is_on, limit._backlog, limit._counted_at = True, 9.0, clock.now
    limit._rates.append(100.0)
    admission = Admission(2, clock, limit=limit, of_all=of_all)
    with admission.admit(), admission.admit(), pytest.raises(OverloadedError) as caught:
        admission.admit().__enter__()
    return caught.value


def test_a_limit_of_a_part_of_the_requests_is_not_told(clock):
    """HAProxy would put it on all of them, other sets' too."""
    assert overloaded(clock, of_all=True).limit == 2
    whole, part = (overloaded(clock, of_all=each) for each in (True, False))
    assert (part.message, part.limit) == (whole.message, None)


def test_under_overload_fewer_are_let_in(clock):
    limit = ConcurrencyLimit(100, num_cores=2, max_batch_size=8, target_wait_s=0.05)
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
    refused: list[float] = []
    admission = Admission(100, clock, refused.append)
    admission.refused_before(30)
    assert refused == [30]


def test_a_refused_request_counts_as_many_images_as_others_have(clock):
    refused: list[float] = []
    admission = Admission(1, clock, refused.append)
    for _ in range(400):
        with admission.admit():
            admission.holds(16)
    with admission.admit(), pytest.raises(OverloadedError):
        admission.admit().__enter__()
    assert refused == [pytest.approx(16, rel=0.01)]
