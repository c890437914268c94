"""A stage behind a call batcher that answers when the test says so."""

import asyncio
from contextvars import ContextVar, copy_context

from app.queueing.scheduler import Lane
from app.serve.shared_calls import CallBatcher

SIZES = (1, 4, 8)
MAX_IMAGES = SIZES[-1]
CALLS_PER_REPLICA = 2
request: ContextVar[str] = ContextVar("request", default="none")


class Stage:
    num_replicas = 1

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.lanes: list[Lane] = []
        self.alone: list[bool] = []
        self.contexts: list[str] = []
        self.ends: list[asyncio.Future[list[str | Exception] | None]] = []
        self.num_ended = 0
        empty = copy_context()
        self.batcher: CallBatcher[str, str] = CallBatcher(
            self._send, SIZES, lambda: self.num_replicas, empty.copy
        )
        self.batcher.calls_per_replica = CALLS_PER_REPLICA

    async def _send(self, lane, parts, is_alone):
        self.calls.append([part.content for part in parts])
        self.lanes.append(lane)
        self.alone.append(is_alone)
        self.contexts.append(request.get())
        self.ends.append(asyncio.get_running_loop().create_future())
        try:
            answers = await self.ends[-1]
        finally:
            self.num_ended += 1
        return answers or [f"{part.content}!" for part in parts]

    def ask(self, *names: str, lane: Lane = "interactive", images: int = 1) -> list[asyncio.Future]:
        return [self.batcher.submit(name, images, 1000, lane) for name in names]


async def turn() -> None:
    """Let the loop do what is due, and what that brings about."""
    for _ in range(6):
        await asyncio.sleep(0)


async def busy(stage: Stage) -> None:
    """Have as many calls under way as may be before others wait."""
    for number in range(CALLS_PER_REPLICA):
        stage.ask(f"busy{number}")
        await turn()
    assert len(stage.calls) == CALLS_PER_REPLICA


async def busy_again(stage: Stage) -> None:
    """Check that the calls that ended are counted right: as many may be under way as before."""
    stage.calls.clear()
    for number in range(CALLS_PER_REPLICA + 2):
        stage.ask(str(number))
        await turn()
    assert len(stage.calls) == CALLS_PER_REPLICA


async def end_all(stage: Stage) -> None:
    """Answer every call, those too that leave when others end."""
    for end in stage.ends:  # which grows meanwhile
        if not end.done():
            end.set_result(None)
        await turn()
