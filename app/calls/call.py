"""Calls one stage: an object in this process, or a deployment through its handle."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from app.calls.hedge import HEDGE_AFTER_SHARE, HedgeBudget, hedged
from app.calls.retry import retry

_second_calls = HedgeBudget()  # of this process


@dataclass(frozen=True)
class InProcess:
    """A stage that the Gateway makes in its own process, when its replica starts."""

    stage: Callable[..., Any]
    args: tuple[Any, ...]


def instantiate(stage: Any, *shared: Any) -> Any:
    """Make a stage of the Gateway's process, with what such stages share; a handle stays one."""
    return stage.stage(*stage.args, *shared) if isinstance(stage, InProcess) else stage


async def call(stage: Any, method: str, *args: Any, left_s: float) -> Any:
    """Call a stage, be it a deployment's handle or an object in this process.

    A handle's ``method.remote(...)`` and an object's coroutine are awaited alike, so the graph can
    put a stage into the Gateway's process without another line changing. When a deployment's
    replica dies, another is called (:mod:`app.calls.retry`); and one more when half of the
    ``left_s`` are over (:mod:`app.calls.hedge`).
    """
    bound = getattr(stage, method)
    remote = getattr(bound, "remote", None)
    if remote is None:
        return await bound(*args)
    return await hedged(
        lambda: retry(lambda: remote(*args)), HEDGE_AFTER_SHARE * left_s, _second_calls
    )
