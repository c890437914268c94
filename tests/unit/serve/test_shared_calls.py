"""Calls that requests share: what leaves together, what each request keeps, and the messages."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import ActorDiedError

from app.access import Caller
from app.answers import Decoded, Fault, MemberAnswer
from app.errors import DeadlineError, HeavyFileError, NotReadyError, OtherSetError, OverloadedError
from app.graph import availability
from app.queueing.fairness import CALLER
from app.serve.replica import classify_many, decode_many
from app.serve.set_stages import RemoteDecoder, RemoteMember
from app.serve.shared_calls import (
    ALONE_BYTES,
    CLASSIFIED,
    DECODED,
    HOLDS_BACK_S,
    MAX_CALL_BYTES,
    MessageError,
    Question,
    SharedCall,
    pack_call,
    read_call,
)
from app.telemetry.spans import SpanIds
from tests.support.batched_stage import (
    CALLS_PER_REPLICA,
    MAX_IMAGES,
    Stage,
    busy,
    busy_again,
    end_all,
    request,
    turn,
)
from tests.support.fakes import FakeDecoder, FakeMember, handle_of
from tests.support.virtual_loop import run_virtually


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    stage = Stage()
    yield stage
    await end_all(stage)


async def test_what_comes_while_calls_are_under_way_leaves_when_one_ends(stage):
    await busy(stage)
    for name in "abc":
        stage.ask(name)
        await turn()
    assert len(stage.calls) == CALLS_PER_REPLICA
    stage.ends[0].set_result(None)
    await turn()
    assert stage.calls[CALLS_PER_REPLICA:] == [["a", "b", "c"]]


async def test_each_replica_may_have_calls_under_way(stage: Stage) -> None:
    stage.num_replicas = 2
    for number in range(3 * CALLS_PER_REPLICA):
        stage.ask(str(number))
        await turn()
    assert len(stage.calls) == 2 * CALLS_PER_REPLICA


@pytest.mark.parametrize("num_over", [0, 3])
async def test_a_full_call_does_not_wait(stage: Stage, num_over: int) -> None:
    await busy(stage)
    stage.ask(*map(str, range(MAX_IMAGES + num_over)))
    await turn()
    assert [len(call) for call in stage.calls[CALLS_PER_REPLICA:]] == [MAX_IMAGES]


@pytest.mark.parametrize(("num_waiting", "leaving"), [(1, 1), (3, 3), (4, 4), (6, 4), (7, 4)])
async def test_a_call_has_the_size_of_a_batch(stage: Stage, num_waiting: int, leaving: int) -> None:
    """What fills no size leaves as it is: by itself each image would pay for a call."""
    await busy(stage)
    stage.ask(*map(str, range(num_waiting)))
    await turn()
    stage.ends[0].set_result(None)
    await turn()
    assert [len(call) for call in stage.calls[CALLS_PER_REPLICA:]] == [leaving]


async def test_requests_of_many_images_share_a_call_as_far_as_they_fit(stage: Stage) -> None:
    await busy(stage)
    stage.ask("a", "b", "c", images=MAX_IMAGES // 2 - 1)
    await turn()
    assert stage.calls[CALLS_PER_REPLICA:] == [["a", "b"]]
    stage.ends[0].set_result(None)
    await turn()
    assert stage.calls[CALLS_PER_REPLICA + 1 :] == []  # two are under way, as before


async def test_a_call_has_no_more_bytes_than_may_be(stage: Stage) -> None:
    for number in range(5):
        stage.batcher.submit(str(number), 1, ALONE_BYTES, "interactive")
    await turn()
    most = MAX_CALL_BYTES // ALONE_BYTES
    assert [len(call) for call in stage.calls] == [most, 5 - most]


async def test_what_is_large_leaves_alone_whatever_is_under_way(stage: Stage) -> None:
    await busy(stage)
    stage.batcher.submit("large", 1, ALONE_BYTES + 1, "interactive")
    stage.batcher.submit("second", 1, 10, "bulk", is_alone=True)
    await turn()
    assert stage.calls[CALLS_PER_REPLICA:] == [["large"], ["second"]]
    assert stage.alone == [False] * CALLS_PER_REPLICA + [True, True]
    for end in stage.ends:
        end.set_result(None)
    await turn()
    await busy_again(stage)


async def test_lanes_share_no_call_and_hold_each_other_back_in_nothing(stage: Stage) -> None:
    stage.ask("photo", "other photo")
    stage.ask("form", lane="bulk")
    await turn()
    assert stage.calls == [["photo", "other photo"], ["form"]]
    assert stage.lanes == ["interactive", "bulk"]
    await asyncio.gather(*(turn() for _ in range(2)))
    stage.ask("second form", lane="bulk")
    await turn()
    stage.ask("third form", lane="bulk")  # waits
    stage.ask("third photo")
    await turn()
    assert stage.calls[2:] == [["second form"], ["third photo"]]


async def test_an_error_of_the_call_is_one_of_all_its_parts(stage: Stage) -> None:
    answers = stage.ask("a", "b")
    await turn()
    stage.ends[0].set_exception(ConnectionError("gone"))
    found = await asyncio.gather(*answers, return_exceptions=True)
    assert [type(one) for one in found] == [ConnectionError] * 2
    await busy_again(stage)


async def test_a_call_ends_with_the_last_of_its_callers(stage: Stage) -> None:
    first, second = stage.ask("a", "b")
    await turn()
    first.cancel()
    await turn()
    assert stage.num_ended == 0
    stage.ends[0].set_result(None)
    assert await second == "b!"
    answers = stage.ask("c", "d")
    await turn()
    for answer in answers:
        answer.cancel()
    await turn()
    assert stage.num_ended == 2
    await busy_again(stage)


async def test_who_goes_away_while_waiting_is_not_sent(stage: Stage) -> None:
    await busy(stage)
    gone, stays = stage.ask("gone", "stays")
    gone.cancel()
    stage.ends[0].set_result(None)
    await turn()
    assert stage.calls[CALLS_PER_REPLICA:] == [["stays"]]
    assert not stays.done()


async def test_a_call_that_is_ended_from_outside_ends_its_callers(stage: Stage) -> None:
    (answer,) = stage.ask("a")
    await turn()
    stage.ends[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await answer
    await busy_again(stage)


def test_calls_that_take_too_long_hold_back_no_others() -> None:
    async def run() -> None:
        stage = Stage()
        await busy(stage)
        stage.ask("waits")
        await asyncio.sleep(HOLDS_BACK_S * 0.9)
        assert len(stage.calls) == CALLS_PER_REPLICA
        await asyncio.sleep(HOLDS_BACK_S * 0.2)
        assert stage.calls[CALLS_PER_REPLICA:] == [["waits"]]
        for end in stage.ends:
            end.set_result(None)
        await turn()
        await busy_again(stage)
        await end_all(stage)

    run_virtually(run())


async def test_a_call_runs_in_no_requests_context(stage: Stage) -> None:
    request.set("mine")
    stage.ask("a")
    await turn()
    stage.batcher.submit("b", 1, 1, "interactive", is_alone=True)
    await turn()
    assert stage.contexts == ["none", "none"]


# Calls that requests share: each keeps its time, its error, its retries and its second call.


class Counting:
    """A stage that counts its calls, and does at each what ``before`` says."""

    def __init__(self, stage: FakeMember | FakeDecoder) -> None:
        self.stage = stage
        self.num_parts: list[int] = []
        self.before: Callable[[int], object] = lambda _: None  # gets the call's number, from 1

    async def _arrived(self, message: bytes) -> None:
        self.num_parts.append(len(read_call(message).questions))
        told = self.before(len(self.num_parts))
        if asyncio.isfuture(told):
            await told

    async def classify_many(self, message: bytes) -> bytes:
        await self._arrived(message)
        return await classify_many(self.stage, message)  # type: ignore[arg-type]

    async def decode_many(self, message: bytes) -> bytes:
        await self._arrived(message)
        return await decode_many(self.stage, message)  # type: ignore[arg-type]


def image(value: int, count: int = 1) -> np.ndarray:
    return np.full((count, 2, 2, 3), value, np.uint8)


def member_of(stage: object) -> RemoteMember:
    return RemoteMember(handle_of(stage))


async def classified(remote: RemoteMember, *values: int, left_s: float = 60) -> list[Any]:
    """Return the answers, or errors, for images of these values that come together."""
    calls = (remote.classify(image(value), left_s, "interactive") for value in values)
    return await asyncio.gather(*calls, return_exceptions=True)


async def decoded_by(stage: object, *requests: list[bytes]) -> list[Any]:
    remote = RemoteDecoder(handle_of(stage))
    calls = (remote.decode(files, 60, "interactive") for files in requests)
    return await asyncio.gather(*calls, return_exceptions=True)


async def test_requests_of_one_moment_share_a_call_and_get_their_own_answers() -> None:
    member = FakeMember()
    member.rows = {value: (value / 10, 0.0, 0.0) for value in range(5)}
    counting = Counting(member)
    remote = member_of(counting)
    answers = await asyncio.gather(
        *(remote.classify(image(value, 1 + value), 60, "interactive") for value in range(3))
    )
    assert counting.num_parts == [3]
    for value, answer in enumerate(answers):
        assert answer.probabilities.shape == (1 + value, 3)
        assert answer.probabilities[:, 0] == pytest.approx(value / 10)
        assert answer.batch_size == (1 + value,) * (1 + value)


async def test_a_fault_of_one_file_is_in_its_own_answer() -> None:
    counting = Counting(FakeDecoder())
    first, second = await decoded_by(counting, [b"good one"], [b"bad", b"good"])
    assert counting.num_parts == [2]
    assert (len(first.images), first.faults) == (1, {})
    assert (len(second.images), list(second.faults)) == (1, [0])
    assert (first.images == 8).all()


class Picky(FakeMember):
    """Refuses images of value 1."""

    async def classify(self, images, left_s, lane="interactive", *, has_features=False):
        if images.flat[0] == 1:
            raise OverloadedError("no room", 3)
        return await super().classify(images, left_s, lane)


async def test_what_one_is_refused_the_others_get() -> None:
    first, refused, third = await classified(member_of(Counting(Picky())), 0, 1, 2)
    assert isinstance(refused, OverloadedError)
    assert refused.limits == (3,)
    assert [len(answer.probabilities) for answer in (first, third)] == [1, 1]


class Asked(FakeMember):
    """Remembers who asks."""

    async def classify(self, images, left_s, lane="interactive", *, has_features=False):
        self.callers = [*getattr(self, "callers", []), CALLER.get()]
        return await super().classify(images, left_s, lane)


async def test_each_has_its_caller() -> None:
    counting = Counting(member := Asked())
    remote, callers = member_of(counting), [Caller("one", share=2.0, has_key=True), Caller("other")]

    async def ask(caller: Caller) -> None:
        CALLER.set(caller)
        await classified(remote, 0)

    await asyncio.gather(*map(ask, callers))
    assert (member.callers, counting.num_parts) == (callers, [2])


async def test_each_has_the_time_that_it_has_left() -> None:
    member = FakeMember()
    remote = member_of(Counting(member))
    await asyncio.gather(classified(remote, 0), classified(remote, 1, left_s=5))
    assert [left_s for _, left_s in member.asked] == pytest.approx([60, 5], abs=4)


async def test_all_images_of_a_replica_that_died_are_asked_for_again() -> None:
    counting = Counting(FakeMember())

    def die_once(number: int) -> None:
        if number == 1:
            raise ActorDiedError

    counting.before = die_once
    answers = await classified(member_of(counting), 0, 1, 2)
    assert [len(answer.probabilities) for answer in answers] == [1, 1, 1]
    assert counting.num_parts == [3, 1, 1, 1]


async def test_a_file_that_kills_replicas_takes_no_others_along(monkeypatch) -> None:
    """Not even where its requests come together again: each is then in a call of its own."""
    monkeypatch.setattr(availability, "PAUSE_S", 0.0)
    monkeypatch.setattr(availability, "LONGEST_PAUSE_S", 0.0)

    class Fragile(Counting):
        async def decode_many(self, message: bytes) -> bytes:
            if b"kills" in message:
                self.num_parts.append(len(read_call(message).questions))
                raise ActorDiedError
            return await super().decode_many(message)

    counting = Fragile(FakeDecoder())
    files = [b"good"] * 4 + [b"kills"] + [b"good"] * 3
    answers = await decoded_by(counting, *([file] for file in files))
    died = [isinstance(answer, ActorDiedError) for answer in answers]
    assert (died, counting.num_parts[0]) == ([file == b"kills" for file in files], 8)
    assert set(counting.num_parts[1:]) == {1}


async def test_one_whose_time_is_half_over_is_asked_for_again_by_itself() -> None:
    counting = Counting(FakeMember())
    hangs: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    counting.before = lambda number: hangs if number == 1 else None
    remote = member_of(counting)
    patient = asyncio.create_task(remote.classify(image(0), 600, "interactive"))
    (answer,) = await classified(remote, 1, left_s=0.1)
    assert len(answer.probabilities) == 1
    assert counting.num_parts == [2, 1]
    assert not patient.done()
    hangs.set_result(None)
    assert len((await patient).probabilities) == 1


async def test_a_stage_says_how_many_calls_it_works_on_at_a_time() -> None:
    member = FakeMember()
    member.calls_at_once = 3
    counting = Counting(member)
    remote = member_of(counting)
    await classified(remote, 0)
    counting.num_parts.clear()
    member.gate = asyncio.Event()
    tasks = []
    for value in range(5):
        tasks.append(asyncio.create_task(classified(remote, value)))
        for _ in range(20):
            await asyncio.sleep(0)
    assert counting.num_parts == [1, 1, 1]  # the other two wait
    member.gate.set()
    await asyncio.gather(*tasks)
    assert counting.num_parts == [1, 1, 1, 2]


async def test_the_call_ends_with_its_last_caller() -> None:
    member = FakeMember()
    member.gate = asyncio.Event()
    remote = member_of(Counting(member))
    tasks = [asyncio.create_task(classified(remote, value)) for value in (0, 1)]
    async with asyncio.timeout(20):
        while len(member.asked) < 2:
            await asyncio.sleep(0)
    for task, was_cancelled in zip(tasks, (False, True), strict=True):
        task.cancel()
        await asyncio.wait([task])
        await turn()
        assert member.was_cancelled is was_cancelled


class Heavy(FakeDecoder):
    """Takes b"heavy" in a call of its own alone."""

    async def decode(self, files, left_s, lane="interactive", *, takes_heavy=True) -> Decoded:
        if b"good, heavy" in files and not takes_heavy:
            raise HeavyFileError("large")
        return await super().decode(files, left_s, lane)


async def test_a_heavy_picture_keeps_nobody_waiting() -> None:
    counting = Counting(Heavy())
    answers = await decoded_by(counting, [b"good"], [b"good, heavy"], [b"good photo"])
    assert [len(answer.images) for answer in answers] == [1, 1, 1]
    assert counting.num_parts == [3, 1]


async def test_a_replica_or_a_message_of_another_version_is_one_of_another_set() -> None:
    class Other:
        async def classify_many(self, message: bytes) -> bytes:
            return b"what is this"

    with pytest.raises(OtherSetError, match="classify_many"):
        await member_of(Other()).classify(image(0), 60, "interactive")
    with pytest.raises(OtherSetError, match="version"):
        await classify_many(FakeMember(), b"TnC0" + bytes(40))  # type: ignore[arg-type]
    with pytest.raises(OtherSetError):
        await decode_many(FakeDecoder(), b"")  # type: ignore[arg-type]


async def test_a_deadline_that_is_over_is_the_stages_to_tell() -> None:
    class Strict(FakeMember):
        async def classify(self, images, left_s, lane="interactive", *, has_features=False):
            if left_s <= 0:
                raise DeadlineError("late")
            return await super().classify(images, left_s, lane)

    (error,) = await classified(member_of(Counting(Strict())), 0, left_s=0.0)
    assert isinstance(error, DeadlineError)


# Calls and answers as bytes: what goes in comes out, and nothing else is believed.


FAULT = Fault(400, "not_an_image", "these bytes are no image: é")
SPAN = SpanIds(2**127 + 5, 2**63 + 7)
spans = st.none() | st.builds(SpanIds, st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1))
lanes = st.sampled_from(("interactive", "bulk"))


def images(count: int, height: int = 4, width: int = 5) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 256, (count, height, width, 3), np.uint8)


@given(
    st.lists(st.tuples(st.lists(st.binary(max_size=20), max_size=4), st.floats(), spans)),
    lanes,
    st.booleans(),
)
def test_files_arrive_as_they_were_sent(parts, lane, is_alone) -> None:
    asked = [Question(files, None, left_s, span) for files, left_s, span in parts]
    call = read_call(pack_call(SharedCall(asked, lane, is_alone)))
    assert (call.lane, call.is_alone) == (lane, is_alone)
    for arrived, sent in zip(call.questions, asked, strict=True):
        assert (arrived.files, arrived.images, arrived.span) == ([*sent.files], None, sent.span)
        assert arrived.left_s == sent.left_s or math.isnan(sent.left_s)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=5), lanes)
def test_images_arrive_as_they_were_sent(counts, lane) -> None:
    asked = [Question((), images(count), 1.5, SPAN) for count in counts]
    call = read_call(pack_call(SharedCall(asked, lane)))
    for found, expected in zip(call.questions, asked, strict=True):
        assert found.images is not None
        np.testing.assert_array_equal(found.images, expected.images)
        assert found.span == SPAN
        assert not found.images.flags.writeable


def test_an_array_that_is_no_block_of_memory_is_copied() -> None:
    block = images(4)[::2]
    (found,) = read_call(pack_call(SharedCall([Question((), block, 1, None)], "bulk"))).questions
    np.testing.assert_array_equal(found.images, block)


def decoded(count: int, faults: dict[int, Fault] | None = None) -> Decoded:
    return Decoded(images(count), faults or {}, tuple(float(i) for i in range(count)), "set é")


def test_what_the_decoder_found_arrives() -> None:
    bad = decoded(0, {0: FAULT})
    answers: list[Any] = [decoded(2, {1: FAULT}), DeadlineError("late"), bad, decoded(1)]
    arrived: list[Any] = DECODED.read(DECODED.pack(answers))
    assert isinstance(arrived[1], DeadlineError)
    for mine, expected in ((arrived[0], answers[0]), (arrived[3], answers[3])):
        np.testing.assert_array_equal(mine.images, expected.images)
        assert mine._replace(images=None) == expected._replace(images=None)
    assert (len(arrived[2].images), arrived[2].faults) == (0, {0: FAULT})


def test_inputs_of_several_sizes_arrive() -> None:
    flat = np.random.default_rng(1).integers(0, 256, (3, 60), np.uint8)
    answers = [Decoded(flat[:2], {}, (1.0, 2.0), "set"), Decoded(flat[2:], {}, (3.0,), "set")]
    for one, expected in zip(DECODED.read(DECODED.pack(answers)), answers, strict=True):
        np.testing.assert_array_equal(one.images, expected.images)


def answer(count: int) -> MemberAnswer:
    rows = np.random.default_rng(count).random((count, 3), np.float32)
    numbers = tuple(float(i) for i in range(count))
    return MemberAnswer(rows, numbers, numbers, tuple(range(1, count + 1)), "set")


def test_what_a_member_found_arrives() -> None:
    answers: list[Any] = [answer(2), OverloadedError("full", 7), answer(1)]
    found: list[Any] = CLASSIFIED.read(CLASSIFIED.pack(answers))
    for one, expected in ((found[0], answers[0]), (found[2], answers[2])):
        np.testing.assert_array_equal(one.probabilities, expected.probabilities)
        assert one._replace(probabilities=None) == expected._replace(probabilities=None)
    assert isinstance(found[1], OverloadedError)
    assert (found[1].message, found[1].limits) == ("full", (7,))
    assert all(type(size) is int for size in found[0].batch_size)


def test_nothing_but_errors_arrives_too() -> None:
    """What is no error of ours by its class's name alone: its arguments may be anything."""
    other, failed = CLASSIFIED.read(
        CLASSIFIED.pack([OtherSetError("other"), KeyError("secret", object())])
    )
    assert isinstance(other, OtherSetError)
    assert type(failed) is NotReadyError
    assert failed.message == "a stage of the graph failed (KeyError); try again"
    (late,) = DECODED.read(DECODED.pack([DeadlineError("late")]))
    assert isinstance(late, DeadlineError)


MESSAGES = {
    "files": (pack_call(SharedCall([Question([b"one", b""], None, 1, SPAN)], "bulk")), read_call),
    "images": (pack_call(SharedCall([Question((), images(2), 1, None)], "bulk")), read_call),
    "decoded": (DECODED.pack([decoded(2, {1: FAULT})]), DECODED.read),
    "classified": (CLASSIFIED.pack([answer(2), DeadlineError("late")]), CLASSIFIED.read),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_that_is_cut_or_has_more_or_is_of_another_version_is_refused(name: str) -> None:
    message, read = MESSAGES[name]
    read(message)
    for wrong in (*(message[:end] for end in range(len(message))), message + b"x"):
        with pytest.raises(MessageError):
            read(wrong)
    with pytest.raises(MessageError, match="this version"):
        read(b"TnX9" + message[4:])


@pytest.mark.parametrize("name", MESSAGES)
@given(place=st.integers(4, 27), byte=st.integers(0, 255))
def test_a_head_with_other_numbers_is_not_believed(name: str, place: int, byte: int) -> None:
    message, read = MESSAGES[name]
    damaged = bytearray(message)
    damaged[place] = byte
    with suppress(MessageError):
        read(bytes(damaged))
