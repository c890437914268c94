"""Calls that requests share: each keeps its time, its error, its retries and its second call."""

import asyncio
from collections.abc import Callable

import numpy as np
import pytest
from ray.exceptions import ActorDiedError

from app.answers import Decoded
from app.errors import DeadlineError, HeavyFileError, OtherSetError, OverloadedError
from app.graph import attempts
from app.serve.remote import RemoteDecoder, RemoteMember
from app.serve.replica import classify_many, decode_many
from app.serve.shared_calls import read_call
from tests.support.fakes import FakeDecoder, FakeMember, handle_of


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


async def test_requests_of_one_moment_share_a_call_and_get_their_own_answers() -> None:
    member = FakeMember()
    member.rows = {value: (value / 10, 0.0, 0.0) for value in range(5)}
    counting = Counting(member)
    remote = RemoteMember(handle_of(counting))
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
    remote = RemoteDecoder(handle_of(counting))
    first, second = await asyncio.gather(
        remote.decode([b"good one"], 60, "interactive"),
        remote.decode([b"bad", b"good"], 60, "interactive"),
    )
    assert counting.num_parts == [2]
    assert (len(first.images), first.faults) == (1, {})
    assert (len(second.images), list(second.faults)) == (1, [0])
    assert (first.images == 8).all()


class Picky(FakeMember):
    """Refuses images of value 1."""

    async def classify(self, images, left_s, lane="interactive"):
        if images.flat[0] == 1:
            raise OverloadedError("no room", 3)
        return await super().classify(images, left_s, lane)


async def test_what_one_is_refused_the_others_get() -> None:
    remote = RemoteMember(handle_of(Counting(Picky())))
    found = await asyncio.gather(
        *(remote.classify(image(value), 60, "interactive") for value in range(3)),
        return_exceptions=True,
    )
    assert isinstance(found[1], OverloadedError)
    assert found[1].limit == 3
    assert [len(found[i].probabilities) for i in (0, 2)] == [1, 1]


async def test_each_has_the_time_that_it_has_left() -> None:
    member = FakeMember()
    remote = RemoteMember(handle_of(Counting(member)))
    await asyncio.gather(
        remote.classify(image(0), 60, "interactive"), remote.classify(image(1), 5, "interactive")
    )
    assert [left_s for _, left_s in member.asked] == [
        pytest.approx(60, abs=4),
        pytest.approx(5, abs=4),
    ]


async def test_all_images_of_a_replica_that_died_are_asked_for_again() -> None:
    counting = Counting(FakeMember())

    def die_once(number: int) -> None:
        if number == 1:
            raise ActorDiedError

    counting.before = die_once
    remote = RemoteMember(handle_of(counting))
    answers = await asyncio.gather(
        *(remote.classify(image(value), 60, "interactive") for value in range(3))
    )
    assert [len(answer.probabilities) for answer in answers] == [1, 1, 1]
    assert counting.num_parts == [3, 1, 1, 1]


async def test_a_file_that_kills_replicas_takes_no_others_along(monkeypatch) -> None:
    """Not even where its requests come together again: each is then in a call of its own."""
    monkeypatch.setattr(attempts, "PAUSE_S", 0.0)
    monkeypatch.setattr(attempts, "LONGEST_PAUSE_S", 0.0)

    class Fragile(Counting):
        async def decode_many(self, message: bytes) -> bytes:
            if b"kills" in message:
                self.num_parts.append(len(read_call(message).questions))
                raise ActorDiedError
            return await super().decode_many(message)

    counting = Fragile(FakeDecoder())
    remote = RemoteDecoder(handle_of(counting))
    files = [b"good"] * 4 + [b"kills"] + [b"good"] * 3
    answers = await asyncio.gather(
        *(remote.decode([file], 60, "interactive") for file in files), return_exceptions=True
    )
    died = [isinstance(answer, ActorDiedError) for answer in answers]
    assert died == [file == b"kills" for file in files]
    assert counting.num_parts[0] == 8
    assert set(counting.num_parts[1:]) == {1}


async def test_one_whose_time_is_half_over_is_asked_for_again_by_itself() -> None:
    counting = Counting(FakeMember())
    hangs: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    counting.before = lambda number: hangs if number == 1 else None
    remote = RemoteMember(handle_of(counting))
    patient = asyncio.create_task(remote.classify(image(0), 600, "interactive"))
    answer = await remote.classify(image(1), 0.1, "interactive")
    assert len(answer.probabilities) == 1
    assert counting.num_parts == [2, 1]
    assert not patient.done()
    hangs.set_result(None)
    assert len((await patient).probabilities) == 1


async def test_a_stage_says_how_many_calls_it_works_on_at_a_time() -> None:
    member = FakeMember()
    member.calls_at_once = 3
    counting = Counting(member)
    remote = RemoteMember(handle_of(counting))
    await remote.classify(image(0), 60, "interactive")
    counting.num_parts.clear()
    member.gate = asyncio.Event()
    tasks = []
    for value in range(5):
        task = remote.classify(image(value), 60, "interactive")
        tasks.append(asyncio.create_task(task))
        for _ in range(20):
            await asyncio.sleep(0)
    assert counting.num_parts == [1, 1, 1]  # the other two wait
    member.gate.set()
    await asyncio.gather(*tasks)
    assert counting.num_parts == [1, 1, 1, 2]


async def test_the_call_ends_with_its_last_caller() -> None:
    member = FakeMember()
    member.gate = asyncio.Event()
    remote = RemoteMember(handle_of(Counting(member)))
    tasks = [
        asyncio.create_task(remote.classify(image(value), 60, "interactive")) for value in (0, 1)
    ]
    while len(member.asked) < 2:
        await asyncio.sleep(0)
    tasks[0].cancel()
    await asyncio.wait(tasks[:1])
    assert not member.was_cancelled
    tasks[1].cancel()
    await asyncio.wait(tasks)
    for _ in range(5):
        await asyncio.sleep(0)
    assert member.was_cancelled


class Heavy(FakeDecoder):
    """Takes b"heavy" in a call of its own alone."""

    async def decode(self, files, left_s, lane="interactive", *, takes_heavy=True) -> Decoded:
        if b"good, heavy" in files and not takes_heavy:
            raise HeavyFileError("large")
        return await super().decode(files, left_s, lane)


async def test_a_heavy_picture_keeps_nobody_waiting() -> None:
    counting = Counting(Heavy())
    remote = RemoteDecoder(handle_of(counting))
    answers = await asyncio.gather(
        *(
            remote.decode([name], 60, "interactive")
            for name in (b"good", b"good, heavy", b"good photo")
        )
    )
    assert [len(answer.images) for answer in answers] == [1, 1, 1]
    assert counting.num_parts == [3, 1]


async def test_a_replica_of_another_version_is_one_of_another_set() -> None:
    class Other:
        async def classify_many(self, message: bytes) -> bytes:
            return b"what is this"

    with pytest.raises(OtherSetError, match="classify_many"):
        await RemoteMember(handle_of(Other())).classify(image(0), 60, "interactive")


async def test_a_message_of_another_version_is_refused() -> None:
    with pytest.raises(OtherSetError, match="version"):
        await classify_many(FakeMember(), b"TnC0" + bytes(40))  # type: ignore[arg-type]
    with pytest.raises(OtherSetError):
        await decode_many(FakeDecoder(), b"")  # type: ignore[arg-type]


async def test_a_deadline_that_is_over_is_the_stages_to_tell() -> None:
    class Strict(FakeMember):
        async def classify(self, images, left_s, lane="interactive"):
            if left_s <= 0:
                raise DeadlineError("late")
            return await super().classify(images, left_s, lane)

    with pytest.raises(DeadlineError):
        await RemoteMember(handle_of(Counting(Strict()))).classify(image(0), 0.0, "interactive")
