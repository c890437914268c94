"""Stages behind handles: what is sent, shared calls, and replicas that die or hang."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ray.exceptions import ActorDiedError

from app.access import Caller
from app.answers import Decoded
from app.errors import DeadlineError, HeavyFileError, OtherSetError, OverloadedError
from app.graph import availability
from app.queueing.fairness import CALLER
from app.serve.replica import classify_many, decode_many
from app.serve.set_stages import RemoteCombiner, RemoteDecoder, RemoteMember
from app.serve.shared_calls import read_call
from tests.support.batched_stage import turn
from tests.support.fakes import FakeCombiner, FakeDecoder, FakeMember, handle_of


async def test_each_stage_gets_its_arguments_and_gives_its_answer():
    decoder = FakeDecoder()
    decoded = await RemoteDecoder(handle_of(decoder)).decode([b"good", b"bad"], 60.0, "bulk")
    assert (len(decoded.images), list(decoded.faults), decoder.lanes) == (1, [1], ["bulk"])
    member = FakeMember((0.1, 0.8, 0.1))
    answer = await RemoteMember(handle_of(member)).classify(decoded.images, 60.0, "bulk")
    assert answer.probabilities[0] == pytest.approx((0.1, 0.8, 0.1))
    assert member.asked == [(1, pytest.approx(60.0, abs=30))]  # what is left when it is sent
    assert member.lanes == ["bulk"]
    (combined,) = await RemoteCombiner(handle_of(FakeCombiner())).combine(
        {"a": answer.probabilities}, 2, 60.0
    )
    assert [p.index for p in combined.predictions] == [1, 0]


class FailsOnce:
    """Dies or hangs at its first call."""

    def __init__(self, is_dead: bool) -> None:
        self.is_dead, self.num_calls = is_dead, 0

    async def combine(self, *_: object) -> int:
        self.num_calls += 1
        if self.num_calls == 1:
            if self.is_dead:
                raise ActorDiedError
            await asyncio.Future()
        return self.num_calls


@pytest.mark.parametrize(("is_dead", "left_s"), [(True, 60.0), (False, 0.1)])
async def test_a_replica_that_died_or_hangs_is_one_of_several(is_dead, left_s):
    assert await RemoteCombiner(handle_of(FailsOnce(is_dead))).combine({}, 1, left_s) == 2


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
