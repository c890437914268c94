"""A stage whose calls a test answers, for the tests of the call batcher."""

from collections.abc import AsyncIterator

import pytest

from tests.support.batched_stage import Stage, end_all


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    stage = Stage()
    yield stage
    await end_all(stage)
