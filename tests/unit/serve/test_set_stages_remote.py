"""Stages behind handles: what is sent, and what happens when a replica dies or hangs."""

import asyncio

import pytest
from ray.exceptions import ActorDiedError

from app.serve.set_stages import RemoteCombiner, RemoteDecoder, RemoteMember
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
