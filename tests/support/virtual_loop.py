"""An event loop whose clock jumps to the next timer, so that no test waits."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


class VirtualLoop(asyncio.SelectorEventLoop):
    """Only for coroutines that wait for nothing but timers and each other."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        selector: Any = self._selector  # type: ignore[attr-defined]  # asyncio's own name
        select = selector.select

        def at_once(timeout: float | None = None) -> list[Any]:
            self._now += timeout or 0.0
            return select(0)

        selector.select = at_once

    def time(self) -> float:
        return self._now


def run_virtually(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a loop of its own with a virtual clock that begins at 0."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)


def virtually(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run a test on such a loop: how busy the machine is has no part in who is first."""

    @functools.wraps(test)
    def run(*arguments: P.args, **named: P.kwargs) -> None:
        run_virtually(test(*arguments, **named))

    return run
