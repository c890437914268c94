"""Decodes small photos on the event loop, those of one turn of it together."""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

R = TypeVar("R")


class LoopTurn(Generic[R]):
    """Gathers what comes in one turn of the loop, and decodes it at the beginning of the next.

    So the code before decoding, decoding itself, and the code after it each run several times in a
    row, and find in the processor's caches what the last run has left there. And the images of a
    turn reach the members together.

    Args:
        decode: gives what becomes of a file; called on the loop.
        most: files of one turn. What else the loop has to do waits for them.

    """

    def __init__(self, decode: Callable[[bytes], R], most: int) -> None:
        self._decode, self._most = decode, most
        self._waiting: list[tuple[bytes, asyncio.Future[R]]] = []
        self._on_end: Callable[[], None] = lambda: None

    @property
    def num_waiting(self) -> int:
        """How many files are decoded in the next turn."""
        return len(self._waiting)

    @property
    def has_room(self) -> bool:
        """Whether the next turn takes one more."""
        return len(self._waiting) < self._most

    def tell(self, ended: Callable[[], None]) -> None:
        """Call ``ended`` on the loop when files have been decoded, and handed on."""
        self._on_end = ended

    def submit(self, data: bytes) -> asyncio.Future[R]:
        """Return the future of what ``decode`` gives or raises; cancelled, it is not called."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._decode_all)
        future: asyncio.Future[R] = loop.create_future()
        self._waiting.append((data, future))
        return future

    def _decode_all(self) -> None:
        files, self._waiting = self._waiting, []
        for data, future in files:
            if future.done():  # its caller went away
                continue
            try:
                future.set_result(self._decode(data))
            except Exception as error:
                future.set_exception(error)
        asyncio.get_running_loop().call_soon(self._on_end)
