"""An event loop whose clock jumps to the next timer, so that no test waits."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """Only for coroutines that wait for nothing but timers and each other."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        select = self._selector.select

        def at_once(timeout: float | None = None) -> list[Any]:
            self._now += timeout or 0.0
            return select(0)

        self._selector.select = at_once

    def time(self) -> float:
        return self._now


def run_virtually(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a loop of its own with a virtual clock that begins at 0."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)
