"""A decoding process as its Gateway has it: started, fed, watched, started again when it dies."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from app.decoding.child import Child
from app.decoding.slots import NUM_SLOTS, READ_BYTES, READY_SLOT, Job, Reply
from app.decoding.small import SMALL_BYTES
from app.decoding.worker import Task
from app.errors import DecodingDiedError
from models.image import ImageRule
from models.image_inputs import Pixels

logger = logging.getLogger("ray.serve")

FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 60.0  # before one that died is started again; doubled each time
CALM_S = 60.0  # without a death, after which the first pause is enough again
MAX_RUN_S = 10.0  # of one small photo, which takes milliseconds
DIED = (
    "the process that decoded this image died meanwhile; try again, with another file if it recurs"
)


class Photo(NamedTuple):
    """A small photo that was decoded; times are by ``time.monotonic``."""

    pixels: Pixels  # uint8, flat
    started: float
    ended: float
    width: int  # of the picture as stored
    height: int


class DecodeProcess:
    """One process; all methods are called on one event loop.

    Args:
        rules: the distinct inputs that are made of a picture.
        max_pixels, max_full_pixels: as in the settings.
        on_end: called whenever a file has ended, after its future has a result.

    """

    def __init__(
        self,
        rules: tuple[ImageRule, ...],
        max_pixels: int,
        max_full_pixels: int,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._task = Task(-1, rules, max_pixels, max_full_pixels)
        self._image_bytes = sum(rule.num_bytes for rule in rules)
        self._on_end = on_end
        self._child: Child | None = None
        self._waiting: dict[int, asyncio.Future[Photo | None]] = {}  # by slot, the oldest first
        self._free: list[int] = list(range(NUM_SLOTS))
        self._may_start_at, self._pause_s, self._started_at = 0.0, FIRST_PAUSE_S, 0.0
        self._answered_at = 0.0  # when it last answered, or was given something after a pause
        self._cpu_s = self._cpu_s_before = 0.0

    @property
    def num_open(self) -> int:
        """How many files it has been given and has not answered."""
        return len(self._waiting)

    @property
    def cpu_s(self) -> float:
        """The CPU time that it has taken, and those before it, in s."""
        return self._cpu_s_before + self._cpu_s

    @property
    def is_ready(self) -> bool:
        """Whether it takes files now."""
        return self._child is not None and self._child.is_ready

    def start(self) -> None:
        """Start it unless it runs, or has just died; it is ready a moment later."""
        now = time.monotonic()
        if self._child is not None or now < self._may_start_at:
            return
        if now - self._started_at > CALM_S:
            self._pause_s = FIRST_PAUSE_S
        self._started_at = now
        try:
            self._child = Child(self._task, self._image_bytes)
        except OSError as error:  # no memory, or no process more
            self._pause()
            logger.warning("No process to decode photos: %s; threads do it", error)
            return
        asyncio.get_running_loop().add_reader(self._child.connection.fileno(), self._read)

    def submit(self, data: bytes) -> asyncio.Future[Photo | None] | None:
        """Hand over a file; None: it does not take one now, or not this one.

        The future's result is None where the file is no small photo, or cannot be decoded.

        Raises, in the future:
            DecodingDiedError: the process died while it decoded this file.

        """
        child = self._child
        if child is None or not child.is_ready or not self._free or len(data) > SMALL_BYTES:
            return None
        slot = self._free.pop()
        child.slots.put_file(slot, data)
        loop = asyncio.get_running_loop()
        if not child.unsent:
            loop.call_soon(child.send)
        child.unsent.append(Job(slot, len(data)).pack())
        if not self._waiting:
            self._answered_at = time.monotonic()
        future = self._waiting[slot] = loop.create_future()
        return future

    def end_if_hung(self) -> None:
        """Kill it if a file has been with it for too long; it is started again."""
        if self._waiting and time.monotonic() - self._answered_at > MAX_RUN_S:
            logger.warning("A process decodes a photo for over %g s and is killed", MAX_RUN_S)
            assert self._child is not None
            self._child.process.kill()

    def close(self) -> None:
        """End it; what it still had is undone, or raises if it was being decoded."""
        if self._child is not None:
            self._forget()

    def _read(self) -> None:
        child = self._child
        if child is None:
            return
        try:
            received = child.connection.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        for reply in child.replies.feed(received):
            if reply.slot == READY_SLOT:
                child.is_ready = True
            else:
                self._answered(child, reply)
        if not received:
            self._died()

    def _answered(self, child: Child, reply: Reply) -> None:
        self._answered_at, self._cpu_s = time.monotonic(), reply.cpu_s
        if (future := self._waiting.pop(reply.slot, None)) is None:
            return
        if not future.done():
            photo = None
            if reply.is_decoded:
                pixels = np.frombuffer(bytes(child.slots.image(reply.slot)), np.uint8)
                photo = Photo(pixels, reply.started, reply.ended, reply.width, reply.height)
            future.set_result(photo)
        self._free.append(reply.slot)
        self._on_end()

    def _died(self) -> None:
        assert self._child is not None
        self._child.process.kill()  # if it has but closed its socket
        logger.warning(
            "A process that decodes photos died; threads do its work for %g s", self._pause_s
        )
        self._pause()
        self._forget()

    def _pause(self) -> None:
        self._may_start_at = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)

    def _forget(self) -> None:
        """Let the process go, and those who wait: all but the file that it died of go elsewhere."""
        child, waiting = self._child, self._waiting
        assert child is not None
        with contextlib.suppress(RuntimeError):  # there is no loop any more
            asyncio.get_running_loop().remove_reader(child.connection.fileno())
        self._child, self._waiting, self._free = None, {}, list(range(NUM_SLOTS))
        self._cpu_s_before, self._cpu_s = self.cpu_s, 0.0
        for slot, future in waiting.items():
            if future.done():
                continue
            if child.slots.has_begun(slot):
                future.set_exception(DecodingDiedError(DIED))
            else:
                future.set_result(None)
        child.end()
        if waiting:
            self._on_end()
