"""What travels between stages, and how a stage is called."""

import asyncio
import pickle

import numpy as np
import pytest
from ray.exceptions import ActorDiedError

from app.calls.call import call
from app.messages import Combined, Decoded, Fault, MemberAnswer
from models.ensemble import Prediction
from models.errors import TandemError, TooManyPixelsError
from tests.support.fakes import FakeHandle


class Adder:
    async def add(self, a: int, b: int) -> int:
        return a + b

    async def fail(self) -> None:
        raise KeyError("inside")


@pytest.mark.parametrize("dress", [lambda stage: stage, FakeHandle], ids=["object", "handle"])
async def test_an_object_and_a_handle_are_called_alike(dress):
    stage = dress(Adder())
    assert await call(stage, "add", 2, 3, left_s=60) == 5
    with pytest.raises(KeyError, match="inside"):
        await call(stage, "fail", left_s=60)
    with pytest.raises(AttributeError, match="multiply"):
        await call(stage, "multiply", left_s=60)


class DiesOnce:
    def __init__(self) -> None:
        self.num_calls = 0

    async def add(self) -> int:
        self.num_calls += 1
        if self.num_calls == 1:
            raise ActorDiedError
        return self.num_calls


async def test_a_replica_that_died_is_one_of_several_an_object_is_alone():
    assert await call(FakeHandle(DiesOnce()), "add", left_s=60) == 2
    with pytest.raises(ActorDiedError):
        await call(DiesOnce(), "add", left_s=60)


class HangsOnce(DiesOnce):
    async def add(self) -> int:
        self.num_calls += 1
        if self.num_calls == 1:
            await asyncio.Future()
        return self.num_calls


async def test_a_replica_that_hangs_is_one_of_several():
    assert await call(FakeHandle(HangsOnce()), "add", left_s=0.1) == 2


def test_a_fault_is_its_error_as_a_value():
    fault = Fault.of(TooManyPixelsError("too large"))
    assert fault == Fault(422, "too_many_pixels", "too large")
    assert Fault.of(TandemError()).message == "TandemError"


def same(a: object, b: object) -> bool:
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    return a == b


@pytest.mark.parametrize(
    "value",
    [
        Fault(400, "not_an_image", "text"),
        Decoded(np.ones((2, 4, 4, 3), np.uint8), {1: Fault(400, "c", "m")}, (0.5, 0.25)),
        MemberAnswer(np.ones((1, 3), np.float32), (0.1,), (0.2,), (1,)),
        Combined([Prediction(0, "a", 0.5)], {"m": [Prediction(0, "a", 0.5)]}, True, 0.5),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_travels_survives_the_way(value):
    back = pickle.loads(pickle.dumps(value))
    assert type(back) is type(value)
    assert all(same(getattr(back, n), getattr(value, n)) for n in value.__dataclass_fields__)
