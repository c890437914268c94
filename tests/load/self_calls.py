"""Replies to a Serve replica that calls itself, some lost: ``python tests/load/self_calls.py``.

Why :mod:`app.graph.rolling_update` does not wait for a reply as long as its request may last. Two
deployments of Serve alone, nothing of ours: one calls itself and the other one in turns, and counts
the calls without a reply after ``LOST_AFTER_S``. Prints JSON.
"""

import asyncio
import time
from pathlib import Path
from typing import Annotated, Any

import ray
import typer
from machine import describe
from ray import serve
from result_file import write_result

LOST_AFTER_S = 3.0
CALLERS = 4
APP = "self_calls"


class Echo:
    """Answers after as long as a small request takes."""

    async def echo(self, message: bytes) -> bytes:
        """Answer with the message."""
        await asyncio.sleep(0.002)
        return message


class Caller:
    """Answers as well, and calls."""

    def __init__(self, other: Any) -> None:
        self._other = other

    async def echo(self, message: bytes) -> bytes:
        """Answer with the message."""
        await asyncio.sleep(0.002)
        return message

    async def call(self, whom: str, num_calls: int) -> dict[str, float]:
        """Call, by some callers at a time; return how many calls were made and lost."""
        handle = serve.get_deployment_handle("Caller", APP) if whom == "itself" else self._other
        num_lost = 0

        async def caller() -> None:
            nonlocal num_lost
            for _ in range(num_calls // CALLERS):
                try:
                    async with asyncio.timeout(LOST_AFTER_S):
                        await handle.echo.remote(b"message")
                except TimeoutError:
                    num_lost += 1

        begun = time.monotonic()
        await asyncio.gather(*(caller() for _ in range(CALLERS)))
        num_made = num_calls // CALLERS * CALLERS
        return {"calls": num_made, "lost": num_lost, "seconds": round(time.monotonic() - begun, 1)}


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    calls: Annotated[int, typer.Option(help="of each turn", min=CALLERS)] = 4000,
    out: Annotated[Path | None, typer.Option(help="write the JSON there")] = None,
) -> None:
    """Measure both in turns."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        caller, echo = (serve.deployment(max_ongoing_requests=64)(kind) for kind in (Caller, Echo))
        handle: Any = serve.run(caller.bind(echo.bind()), name=APP, route_prefix=None)
        rows = [
            {whom: handle.call.remote(whom, calls).result() for whom in ("itself", "another")}
            for _ in range(rounds)
        ]
    finally:
        serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()
    lost = {whom: sum(row[whom]["lost"] for row in rows) for whom in rows[0]}
    made = {whom: sum(row[whom]["calls"] for row in rows) for whom in rows[0]}
    write_result({"machine": describe(), "calls": made, "lost": lost, "rounds": rows}, out)


if __name__ == "__main__":
    typer.run(main)
