"""Lets what is asked of a remote stage leave together: one call for the images of many requests.

A call between processes costs as much for one image as for eight. While a few calls are under way,
what comes waits here and leaves in the next one; there is no timer, so that on an idle stage a lone
image leaves at once. It is the rule of :mod:`app.queueing.batch_queue`, applied to the transport,
and calls have the sizes of batches: of six images that wait, four leave as one batch, and the two
join those that come meanwhile; in a call of six they would run by themselves.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from app.queueing.priority import LANES, Lane

Q = TypeVar("Q")
A = TypeVar("A")

SIZES = (8,)  # of calls, in images, of a stage that takes images one by one
MAX_CALL_BYTES = 3 * 2**20  # below the 4 MiB that gRPC allows where nobody raises it
ALONE_BYTES = 2**20  # a part with more has a call to itself, whose price is little beside it
# A call that takes longer holds back no others: its replica may hang, or have very much to do.
HOLDS_BACK_S = 1.0


@dataclass(slots=True, eq=False)
class Part(Generic[Q, A]):
    """What one request asks of a stage; ``num_bytes`` is the larger of question and answer."""

    content: Q
    num_images: int
    num_bytes: int
    future: asyncio.Future[A]


@dataclass(slots=True, eq=False)
class _Call(Generic[Q, A]):
    parts: list[Part[Q, A]]
    num_wanted: int  # parts whose callers still wait
    task: asyncio.Task[None] | None = None
    overdue: asyncio.TimerHandle | None = None


@dataclass(slots=True)
class _LaneState(Generic[Q, A]):
    waiting: deque[Part[Q, A]] = field(default_factory=deque)
    num_calls: int = 0  # under way, but for those that take too long


# Makes a call: the answers of its parts, or their errors, in order. It raises what is an error of
# them all.
Send = Callable[[Lane, Sequence[Part[Q, A]], bool], Awaitable[Sequence[A | BaseException]]]


class CallBatcher(Generic[Q, A]):
    """Makes the calls of one stage; a part's error is its own, a call's is that of all its parts.

    Lanes share no call, so that a photo does not wait for a form. A part whose caller goes away
    does not end the call it left with, unless it was the last one. All methods are called on the
    event loop.

    Args:
        send: makes a call; its last argument says that the part is alone in it, on purpose.
        sizes: of calls, in images, the smaller first; what fills the largest never waits.
        num_replicas: how many the stage has now.
        context: gives the context that a call runs in; it belongs to no request.

    """

    def __init__(
        self,
        send: Send[Q, A],
        sizes: Sequence[int] = SIZES,
        num_replicas: Callable[[], int] = lambda: 1,
        context: Callable[[], Context] = copy_context,
    ) -> None:
        self._send, self._num_replicas, self._context = send, num_replicas, context
        self._sizes = sorted(sizes)
        self.calls_per_replica = 1  # and lane; as many as a replica works on at a time
        self._lanes: dict[Lane, _LaneState[Q, A]] = {lane: _LaneState() for lane in LANES}
        self._calls: set[_Call[Q, A]] = set()
        self._is_scheduled = False

    def submit(
        self, content: Q, num_images: int, num_bytes: int, lane: Lane, *, is_alone: bool = False
    ) -> asyncio.Future[A]:
        """Return the future of what leaves in the next call.

        What is large, or ``is_alone``, leaves now, whatever is under way, in a call of its own.
        """
        future: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        part = Part(content, num_images, num_bytes, future)
        if is_alone or num_bytes > ALONE_BYTES:
            self._start(lane, [part], is_alone=True)
        else:
            self._lanes[lane].waiting.append(part)
            self._schedule()
        return future

    def _schedule(self) -> None:
        """Look at what waits after those that come in this turn of the loop are there too."""
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._send_waiting)

    def _send_waiting(self) -> None:
        self._is_scheduled = False
        most = self.calls_per_replica * max(1, self._num_replicas())
        for lane, state in self._lanes.items():
            state.waiting = deque(part for part in state.waiting if not part.future.done())
            while parts := self._leaving(state, may_be_small=state.num_calls < most):
                self._start(lane, parts, is_alone=False)

    def _leaving(self, state: _LaneState[Q, A], *, may_be_small: bool) -> list[Part[Q, A]]:
        """Take what leaves in one call: the largest size that what waits can fill."""
        waiting = state.waiting
        num_waiting = sum(part.num_images for part in waiting)
        largest = self._sizes[-1]
        if not waiting or (num_waiting < largest and not may_be_small):
            return []
        filled = (size for size in self._sizes if 1 < size <= num_waiting)
        size = max(filled, default=num_waiting)  # fewer than fill any leave together all the same
        parts = [waiting.popleft()]
        num_images, num_bytes = parts[0].num_images, parts[0].num_bytes
        while waiting and num_images < size:
            num_images += waiting[0].num_images
            num_bytes += waiting[0].num_bytes
            if num_images > largest or num_bytes > MAX_CALL_BYTES:
                break
            parts.append(waiting.popleft())
        return parts

    def _start(self, lane: Lane, parts: list[Part[Q, A]], *, is_alone: bool) -> None:
        call = _Call(parts, len(parts))
        self._calls.add(call)
        loop = asyncio.get_running_loop()
        call.task = loop.create_task(self._make(lane, call, is_alone), context=self._context())
        if not is_alone:
            self._lanes[lane].num_calls += 1
            call.overdue = loop.call_later(HOLDS_BACK_S, self._let_others_go, lane, call)
        call.task.add_done_callback(lambda _: self._ended(lane, call))
        for part in parts:
            part.future.add_done_callback(lambda future: self._left(call, future))

    async def _make(self, lane: Lane, call: _Call[Q, A], is_alone: bool) -> None:
        try:
            answers = await self._send(lane, call.parts, is_alone)
        except Exception as error:
            answers = [error] * len(call.parts)
        for part, answer in zip(call.parts, answers, strict=True):
            if part.future.done():  # its caller went away
                continue
            if isinstance(answer, BaseException):
                part.future.set_exception(answer)
            else:
                part.future.set_result(answer)

    def _let_others_go(self, lane: Lane, call: _Call[Q, A]) -> None:
        """Count a call no more."""
        if call.overdue is not None:
            call.overdue.cancel()
            call.overdue = None
            self._lanes[lane].num_calls -= 1
            self._schedule()

    def _ended(self, lane: Lane, call: _Call[Q, A]) -> None:
        self._let_others_go(lane, call)
        self._calls.discard(call)
        for part in call.parts:  # of a call that was cancelled from outside
            part.future.cancel()

    def _left(self, call: _Call[Q, A], future: asyncio.Future[A]) -> None:
        """End a call that nobody waits for any more."""
        if future.cancelled():
            call.num_wanted -= 1
            if not call.num_wanted and call.task is not None:
                call.task.cancel()
