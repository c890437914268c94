"""What a request may ask for, and the time that it has: the same for HTTP and gRPC."""

import asyncio
from typing import Any

import pytest

from app.errors import BadParameterError, OverloadedError, SlowBodyError
from app.graph.observer import RequestObserver
from app.graph.request import ClassifyRequest, RequestBody, RequestOptions
from app.queueing.admission import Admission, ByteBudget, Share
from app.settings import Settings
from tests.support.fakes import FakeService
from tests.support.hand_clock import HandClock


class Taken(FakeService):
    """The service's way into the graph, and the requests that it handed on."""

    def __init__(self, answer_timeout_s: float = 10.0, **settings: object) -> None:
        super().__init__(Settings(**settings), num_classes=3)
        self.answer_within(answer_timeout_s)
        self.clock = HandClock()
        self.byte_budget = ByteBudget(1000)
        self.admission = Admission(1)
        self.num_read, self.body_s = 0, 0.0
        self.body = RequestBody([])

    async def ask(self, *files: bytes, top_k_of_body: int | None = None, **options: Any) -> None:
        self.body = RequestBody(list(files), top_k_of_body)
        observer = RequestObserver(self.clock.monotonic)
        with self.admit(RequestOptions("id", **options), observer) as admitted:
            async with admitted.arriving():
                self.read(admitted.share)
            await admitted.answer(self.body)

    def read(self, share: Share) -> None:
        self.num_read += 1
        self.clock.now += self.body_s
        share.grow(sum(map(len, self.body.files)))

    async def classify(self, request: ClassifyRequest) -> list:
        self.requests.append(request)
        self.held = self.byte_budget.num_held
        return []


@pytest.mark.parametrize(
    ("asked", "expected"), [(None, 10.0), (2.5, 2.5), (99.0, 10.0), (float("inf"), 10.0)]
)
async def test_a_client_can_only_shorten_the_time(asked, expected):
    taken = Taken()
    await taken.ask(b"a", timeout_s=asked)
    assert taken.requests[0].timeout_s == expected


async def test_the_answer_has_its_own_time_from_when_the_body_is_there():
    taken = Taken(answer_timeout_s=4.0)
    taken.body_s = 3.0
    await taken.ask(b"a")
    await taken.ask(b"a", timeout_s=5.0)
    assert [request.timeout_s for request in taken.requests] == [7.0, 5.0]
    assert taken.requests[1].left_s == 2.0


@pytest.mark.parametrize(("given", "expected"), [(None, 3), (1, 1), (3, 3)])
async def test_top_k_is_the_settings_unless_given_and_never_more_than_there_are(given, expected):
    taken = Taken(default_top_k=5)
    await taken.ask(b"a", top_k=given)
    assert taken.requests[0].top_k == expected


@pytest.mark.parametrize("top_k", [0, -1, 4])
async def test_a_top_k_that_is_none_is_refused_before_anything_is_read(top_k):
    taken = Taken()
    with pytest.raises(BadParameterError, match="this model set has 3 classes: ask for 1 to 3"):
        await taken.ask(b"a", top_k=top_k)
    assert taken.num_read == 0


async def test_a_top_k_that_the_body_has_counts():
    taken = Taken(default_top_k=1)
    await taken.ask(b"a", top_k_of_body=2)
    assert taken.requests[0].top_k == 2
    with pytest.raises(BadParameterError, match="top_k is 4"):
        await taken.ask(b"a", top_k_of_body=4)
    assert len(taken.requests) == 1


async def test_nothing_is_read_of_a_request_that_is_not_admitted():
    taken = Taken()
    with taken.admission.admit(), pytest.raises(OverloadedError):
        await taken.ask(b"a")
    assert taken.num_read == 0


async def test_bytes_are_held_until_the_answer_is_there():
    taken = Taken()
    await taken.ask(b"abc", b"de")
    assert (taken.held, taken.byte_budget.num_held) == (5, 0)


@pytest.mark.parametrize(
    ("files", "priority", "lane"),
    [((b"a",), None, "interactive"), ((b"a", b"b"), None, "bulk"), ((b"a",), "u=7", "bulk")],
)
async def test_the_lane_is_by_the_number_of_files_unless_the_client_says(files, priority, lane):
    taken = Taken()
    await taken.ask(*files, priority=priority)
    assert taken.requests[0].lane == lane


async def test_a_body_that_does_not_come_is_not_waited_for_beyond_the_request():
    taken = Taken()
    options = RequestOptions("id", timeout_s=0.01)
    with pytest.raises(SlowBodyError), taken.admit(options, RequestObserver()) as admitted:
        async with admitted.arriving():
            await asyncio.Future()
    assert taken.admission.num_under_way == 0
