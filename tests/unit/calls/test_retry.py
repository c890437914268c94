"""A call that ended with its replica is made again, but not for ever and for nothing else."""

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from app.calls.retry import MAX_CALLS, retry
from app.errors import OverloadedError


class Dying:
    """Fails ``num_deaths`` times, then answers."""

    def __init__(self, num_deaths: int, error: Exception) -> None:
        self.num_deaths, self.error, self.num_calls = num_deaths, error, 0

    async def __call__(self) -> str:
        self.num_calls += 1
        if self.num_calls <= self.num_deaths:
            raise self.error
        return "answer"


DEATHS = [ActorUnavailableError("Actor is unavailable.", b"\0" * 16), ActorDiedError()]


@pytest.mark.parametrize("error", DEATHS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("num_deaths", range(MAX_CALLS))
async def test_a_death_is_no_error_while_calls_are_left(error, num_deaths):
    call = Dying(num_deaths, error)
    assert await retry(call, pause_s=0) == "answer"
    assert call.num_calls == num_deaths + 1


async def test_what_kills_every_replica_is_given_up():
    call = Dying(100, DEATHS[0])
    with pytest.raises(ActorUnavailableError):
        await retry(call, pause_s=0)
    assert call.num_calls == MAX_CALLS


@pytest.mark.parametrize(
    "error", [OverloadedError("full"), RayTaskError("f", "trace", ValueError()), TimeoutError()]
)
async def test_an_error_that_the_stage_raised_is_not_asked_for_twice(error):
    call = Dying(1, error)
    with pytest.raises(type(error)):
        await retry(call, pause_s=0)
    assert call.num_calls == 1
