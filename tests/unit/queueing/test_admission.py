"""Who is let in: the limit, and the lower one of an overload.

How many requests may be under way, when more come than are answered, and when that is over.

Bodies that are on their way: for how long, and who gives way when there is no place left.
"""

import asyncio
import pickle
from contextlib import ExitStack

import pytest

from app.environment import MIB
from app.errors import OverloadedError, SlowBodyError
from app.queueing import admission as module
from app.queueing.admission import Admission, Uploads
from app.queueing.overload import MAX_BACKLOG_S, QUIET_ADMITTED, QUIET_S, ConcurrencyLimit, limit_of
from app.settings import Settings
from tests.support.cases import cases
from tests.support.hand_clock import HandClock
from tests.support.virtual_loop import virtually

TWO_CORES = (2, 8, 0.05)  # cores, the largest batch, and the wait, s
RATE = 100.0


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def limit() -> ConcurrencyLimit:
    return ConcurrencyLimit(128, *TWO_CORES)


def refusal_of(admission: Admission) -> OverloadedError:
    with pytest.raises(OverloadedError) as caught:
        admission.admit().__enter__()
    return caught.value


def enter(stack: ExitStack, admission: Admission, num: int) -> None:
    for _ in range(num):
        stack.enter_context(admission.admit())


def test_the_limit(clock):
    admission = Admission(2, clock)
    with admission.admit(), admission.admit():
        assert admission.num_under_way == 2
        assert "2 requests are under way, the limit" in refusal_of(admission).message
    with pytest.raises(RuntimeError), admission.admit():
        raise RuntimeError("a request that fails gives its place back too")
    assert admission.num_under_way == 0


def test_a_refusal_survives_its_way_through_another_process():
    error = pickle.loads(pickle.dumps(OverloadedError("full", 7)))
    assert (error.message, error.limits) == ("full", (7,))
    assert OverloadedError("full").limits == ()


def test_a_limit_of_a_part_of_the_requests_is_not_told(clock):
    """HAProxy would put it on all of them, other sets' too."""
    limit = ConcurrencyLimit(2, num_cores=1, max_batch_size=1, target_wait_s=0.0)
    limit.is_on, limit._backlog, limit._counted_at = True, 9.0, clock.now
    limit._rates.append(100.0)
    refusals = []
    for of_all in (True, False):
        admission = Admission(2, clock, limit=limit, of_all=of_all)
        with admission.admit(), admission.admit():
            refusals.append(refusal_of(admission))
    assert [refusal.limits for refusal in refusals] == [(2, 2, 1), ()]
    assert refusals[0].message == refusals[1].message


def test_under_overload_fewer_are_let_in(clock):
    limit = ConcurrencyLimit(100, num_cores=2, max_batch_size=8, target_wait_s=0.05)
    admission = Admission(100, clock, limit=limit)
    with ExitStack() as others, ExitStack() as first, ExitStack() as few:
        enter(first, admission, 30)
        enter(others, admission, 70)
        assert refusal_of(admission).limits == (100, 100, 50)
        clock.now += 0.3
        first.close()  # 100/s
        enter(first, admission, 30)
        refusal_of(admission)
        refusal = refusal_of(admission)
        assert "100 requests are under way, the lim" in refusal.message
        assert refusal.limits == (21, 21, 10)
        others.close()
        refusal_of(admission)
        first.close()
        enter(few, admission, 21)
        refusal_of(admission)


def test_a_refused_request_counts_as_many_images_as_others_have(clock):
    refused: list[float] = []
    admission = Admission(1, clock, refused.append)
    for _ in range(400):
        with admission.admit():
            admission.holds(16)
    with admission.admit():
        refusal_of(admission)
    assert refused == [pytest.approx(16, rel=0.01)]


def overloaded_concurrency_limit(rate: float = RATE, most: int = 128) -> ConcurrencyLimit:
    """Return one that saw a second of answers between two refusals, all places taken."""
    limit = ConcurrencyLimit(most, *TWO_CORES)
    limit.refused(0.0, most)
    for number in range(int(rate)):
        limit.answered((number + 1) / rate, most)
    limit.refused(1.0, most, num=int(rate))
    return limit


@cases(
    "rate, expected",
    (RATE, 16 + 5),  # two cores' batches, and 50 ms at 100/s
    (40.0, 18),
    (400.0, 36),
    (20_000.0, 128),
)
def test_the_number_follows_the_rate_within_its_bounds(rate, expected):
    limit = overloaded_concurrency_limit(rate=rate)
    assert limit.is_on
    assert limit.value == expected


def test_one_refusal_is_no_overload(limit):
    for at in (0.0, 0.01, 0.02):  # a burst: nobody was answered between
        limit.refused(at, 128)
    assert not limit.is_on


def test_overload_is_known_when_a_quarter_of_the_crowd_was_answered(limit):
    limit.refused(0.0, 128)
    for number in range(31):
        limit.answered((number + 1) / RATE, 128)
    limit.refused(0.4, 128)
    assert not limit.is_on
    limit.answered(0.5, 128)
    limit.refused(0.5, 128)
    assert limit.is_on


def test_a_stall_is_no_overload(limit):
    """A crowd that came of one goes when it is over; who is refused later begins anew."""
    limit.refused(0.0, 128)
    for left in range(127, 60, -1):
        limit.answered(5.0 + (128 - left) / RATE, left)
    assert not limit.crowd
    limit.refused(7.0, 128)
    assert not limit.is_on


def test_now_and_then_one_refusal_is_no_overload(limit):
    """As many clients as there are places keep them taken; a probe beside them finds none."""
    for number in range(1000):
        limit.answered(number / RATE, 127)
        if number % 100 == 0:
            limit.refused(number / RATE, 128)
    assert not limit.is_on


def test_refusals_that_are_told_late_are_none_of_now(limit):
    """HAProxy tells of them with the next request, be it minutes later."""
    limit.refused(60.0, 0)
    assert not limit.crowd


def test_a_slow_window_does_not_make_the_service_slow():
    limit = overloaded_concurrency_limit()
    for second in range(6):
        for _ in range(40):
            limit.answered(2.0 + second, 20)  # 40/s
    assert limit.value == 21


def test_it_is_over_when_nobody_was_refused_for_a_while():
    limit = overloaded_concurrency_limit()
    now = 1.0
    for _ in range(QUIET_ADMITTED):
        now += 2 * QUIET_S / QUIET_ADMITTED
        assert limit.is_on
        limit.admitted(now)
    assert not limit.is_on
    assert not limit.crowd


def test_a_refusal_makes_the_quiet_time_begin_anew():
    limit = overloaded_concurrency_limit()
    for number in range(10 * QUIET_ADMITTED):
        now = 1.0 + number * QUIET_S / QUIET_ADMITTED
        limit.admitted(now)
        if number % (QUIET_ADMITTED // 2) == 0:
            limit.refused(now, 20)
    assert limit.is_on


def test_it_is_over_when_all_that_came_could_have_been_answered():
    limit = overloaded_concurrency_limit()
    for _ in range(50):  # at once, on top of a second's work
        limit.arrived(1.0)
    limit.refused(1.0, 128)
    limit.arrived(1.0 + MAX_BACKLOG_S)  # 100 came, and 90 would have been answered
    assert limit.is_on
    limit.arrived(1.3 + MAX_BACKLOG_S)
    assert not limit.is_on


def test_forms_of_many_files_are_fewer_requests():
    limit = overloaded_concurrency_limit()
    limit.images_per_request = 16.0
    assert limit.value == 8  # one on each core and one that is read, and 5 for the rate
    limit.images_per_request = 1.0
    assert limit.value == 21


@pytest.mark.parametrize("changed", [{"members": "deployment"}, {"target_wait_ms": None}])
def test_where_there_is_no_such_limit(changed):
    assert limit_of(Settings(), 2) is not None
    assert limit_of(Settings(**changed), 2) is None


async def never() -> None:
    await asyncio.Future()


async def read(uploads: Uploads, begun: asyncio.Event, num_bytes: int = 0) -> None:
    async with uploads.arriving(3600, num_bytes):
        begun.set()
        await never()


async def reading(uploads: Uploads, num_bytes: int = 0) -> asyncio.Task[None]:
    begun = asyncio.Event()
    task = asyncio.create_task(read(uploads, begun, num_bytes))
    await begun.wait()
    return task


async def test_a_body_that_does_not_come_is_not_waited_for():
    refusal = r"had not arrived after 0 s.*x-request-timeout-seconds"
    with pytest.raises(SlowBodyError, match=refusal):
        async with Uploads().arriving(0):
            await never()


async def test_one_that_comes_in_time():
    uploads = Uploads()
    async with uploads.arriving(3600):
        await asyncio.sleep(0)
        assert uploads.cut_slowest() is False  # it is not slow yet
        assert uploads.num_bytes == 0  # it announced no length
    assert uploads.cut_slowest() is False


async def test_an_error_goes_through_as_it_is():
    uploads = Uploads()
    with pytest.raises(OverloadedError):
        async with uploads.arriving(3600):
            raise OverloadedError("no room for these bytes")
    assert not uploads.cut_slowest()


async def test_the_first_of_the_slow_is_cut(monkeypatch):
    monkeypatch.setattr(module, "SLOW_AFTER_S", 0.0)
    uploads = Uploads()
    first, second = await reading(uploads), await reading(uploads)
    assert uploads.cut_slowest()
    with pytest.raises(SlowBodyError, match="other requests needed its place"):
        await first
    assert not second.done()
    assert uploads.cut_slowest()
    assert not uploads.cut_slowest()
    with pytest.raises(SlowBodyError):
        await second


@pytest.mark.parametrize("slow_after_s", [0.0, 3600.0])
async def test_one_whose_time_is_over_already_gives_its_place_too(monkeypatch, slow_after_s):
    """Its timer has fired and can no longer be moved, but the form's files are still being closed.

    The error would be raised in the request that asks for a place, which is innocent.
    """
    monkeypatch.setattr(module, "SLOW_AFTER_S", slow_after_s)
    uploads, expired, closed = Uploads(), asyncio.Event(), asyncio.Event()

    async def closes_slowly() -> None:
        async with uploads.arriving(0):
            try:
                await never()
            finally:
                expired.set()
                await closed.wait()

    task = asyncio.create_task(closes_slowly())
    await expired.wait()
    assert uploads.cut_slowest()
    assert not uploads.cut_slowest()  # one place, given once
    closed.set()
    with pytest.raises(SlowBodyError, match=r"had not arrived after 0 s, the request's time limit"):
        await task


@virtually
async def test_a_slow_upload_does_not_keep_others_out():
    admission = Admission(1)
    slow = asyncio.create_task(_admitted(admission))
    await asyncio.sleep(0)
    refusal_of(admission)
    await asyncio.sleep(module.SLOW_AFTER_S)
    with admission.admit():
        with pytest.raises(SlowBodyError):
            await slow
        assert admission.num_under_way == 1


@virtually
async def test_a_long_upload_is_slow_later():
    """By the size that it announced."""
    uploads = Uploads()
    task = await reading(uploads, 8 * MIB)
    await asyncio.sleep(8 * module.SLOW_S_PER_MIB - 0.01)
    assert not uploads.cut_slowest()
    await asyncio.sleep(0.01)
    assert uploads.cut_slowest()
    with pytest.raises(SlowBodyError):
        await task


async def test_slow_uploads_have_half_of_the_places(monkeypatch):
    """HAProxy counts them too, and would let nobody through to have them cut."""
    monkeypatch.setattr(module, "SLOW_AFTER_S", 0.0)
    admission = Admission(10)
    slow = await uploading(admission, 10)
    with admission.admit():
        await asyncio.wait(slow, return_when=asyncio.FIRST_EXCEPTION)
        assert [task.done() for task in slow] == [True] * 5 + [False] * 5
    assert sum(isinstance(error, SlowBodyError) for error in await cancelled(slow)) == 5


async def test_nobody_is_cut_for_a_request_that_is_refused(monkeypatch):
    monkeypatch.setattr(module, "SLOW_AFTER_S", 0.0)
    admission = Admission(100, HandClock(), limit=AtItsLimit(100, *TWO_CORES))
    slow = await uploading(admission, 60)
    with ExitStack() as others:
        enter(others, admission, 16)
        num_left = admission.uploads.num
        assert "the limit while more come" in refusal_of(admission).message
        assert admission.uploads.num == num_left
    await cancelled(slow)


class AtItsLimit(ConcurrencyLimit):
    """An overload: 16 may be answered at a time."""

    is_on, value = True, 16

    def __init__(self, *settings) -> None:
        super().__init__(*settings)
        self.is_on = True

    def arrived(self, now: float, num: int = 1) -> None:
        """It goes on."""

    def admitted(self, now: float) -> None:
        """It goes on."""


async def _admitted(admission: Admission) -> None:
    with admission.admit():
        async with admission.arriving(3600):
            await never()


async def uploading(admission: Admission, num: int) -> list[asyncio.Task[None]]:
    tasks = [asyncio.create_task(_admitted(admission)) for _ in range(num)]
    await asyncio.sleep(0)
    return tasks


async def cancelled(tasks: list[asyncio.Task[None]]) -> list[BaseException | None]:
    for task in tasks:
        task.cancel()
    return await asyncio.gather(*tasks, return_exceptions=True)
