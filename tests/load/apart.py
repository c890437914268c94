"""Work in a process of its own while a benchmark goes on: attackers do not share its event loop."""

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

Work = Callable[[Connection], dict[str, Any]]


@contextmanager
def apart(work: Work, within_s: float = 30) -> Iterator[dict[str, Any]]:
    """Run ``work`` while the block does; what it returns is in the yielded dict afterwards.

    ``work`` sends something when it has begun, and ends within ``within_s`` after it is sent
    something.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()  # no Event: a child that was killed may hold its lock
    process = context.Process(target=_run, args=(work, theirs), daemon=True)
    process.start()
    theirs.close()
    result: dict[str, Any] = {}
    ours.recv()
    try:
        yield result
    finally:
        with suppress(OSError, EOFError):  # it was told to end as we were
            ours.send("over")
            if ours.poll(within_s):
                result.update(ours.recv())
        process.kill()
        process.join()


def _run(work: Work, pipe: Connection) -> None:
    pipe.send(work(pipe))
