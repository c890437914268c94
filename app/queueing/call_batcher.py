"""Batches calls of a remote stage: one call carries the images of many requests.

A call between processes costs as much for one image as for eight. While calls are under way,
further images wait here for the next call. There is no timer: to an idle stage a single image
leaves at once, as in :mod:`app.queueing.batch_queue`. Calls have the sizes of batches. With sizes
1, 4 and 8, of six waiting images four leave, and the other two wait for more: in a call of six they
would run as a small batch.
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

SIZES = (8,)  # of calls, in images, to a stage without batches
MAX_CALL_BYTES = 3 * 2**20  # below gRPC's default limit of 4 MiB
ALONE_BYTES = 2**20  # A larger part gets a call of its own, whose cost is small in comparison.
# A call that takes longer does not count as under way: its replica may hang, or be very busy.
HOLDS_BACK_S = 1.0


@dataclass(slots=True, eq=False)
class Part(Generic[Q, A]):
    """One request's part of a call; ``num_bytes`` is the larger of question and answer."""

    content: Q
    num_images: int
    num_bytes: int
    future: asyncio.Future[A]


@dataclass(slots=True, eq=False)
class _Call(Generic[Q, A]):
    parts: list[Part[Q, A]]
    num_wanted: int  # parts whose callers are still waiting
    task: asyncio.Task[None] | None = None
    overdue: asyncio.TimerHandle | None = None


@dataclass(slots=True)
class _LaneState(Generic[Q, A]):
    waiting: deque[Part[Q, A]] = field(default_factory=deque)
    num_calls: int = 0  # under way, without those that take too long


# Makes a call, and returns the answer or error of each part, in order; raises if all parts failed.
Send = Callable[[Lane, Sequence[Part[Q, A]], bool], Awaitable[Sequence[A | BaseException]]]


class CallBatcher(Generic[Q, A]):
    """Makes the calls of one stage. An error of one part does not affect the other parts.

    Each call is of one lane, so that a photo does not wait for a form. A caller that goes away
    ends the call only if nobody else waits for it. All methods are called on the event loop.

    Args:
        send: makes a call; its last argument is True for a part that asked to be alone in it.
        sizes: of calls, in images, ascending; images that fill the largest leave at once.
        num_replicas: returns how many replicas the stage has now.
        context: returns the context in which a call runs, which belongs to no request.

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
        self.calls_per_replica = 1  # calls of each lane that a replica works on at a time
        self._lanes: dict[Lane, _LaneState[Q, A]] = {lane: _LaneState() for lane in LANES}
        self._calls: set[_Call[Q, A]] = set()
        self._is_scheduled = False

    def submit(
        self, content: Q, num_images: int, num_bytes: int, lane: Lane, *, is_alone: bool = False
    ) -> asyncio.Future[A]:
        """Queue a part for the next call, and return the future of its answer.

        A large part, or a part with ``is_alone``, leaves at once in a call of its own.
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
        """Send waiting parts at the end of this turn of the loop, together with those it adds."""
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
        """Remove and return the parts of the next call: the largest size that they fill."""
        waiting = state.waiting
        num_waiting = sum(part.num_images for part in waiting)
        largest = self._sizes[-1]
        if not waiting or (num_waiting < largest and not may_be_small):
            return []
        filled = (size for size in self._sizes if 1 < size <= num_waiting)
        size = max(filled, default=num_waiting)  # images that fill no size leave together
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
            if part.future.done():  # its caller has gone
                continue
            if isinstance(answer, BaseException):
                part.future.set_exception(answer)
            else:
                part.future.set_result(answer)

    def _let_others_go(self, lane: Lane, call: _Call[Q, A]) -> None:
        """Stop counting a call as under way, so that others can be made."""
        if call.overdue is not None:
            call.overdue.cancel()
            call.overdue = None
            self._lanes[lane].num_calls -= 1
            self._schedule()

    def _ended(self, lane: Lane, call: _Call[Q, A]) -> None:
        self._let_others_go(lane, call)
        self._calls.discard(call)
        for part in call.parts:  # still waiting, if the call's task was cancelled
            part.future.cancel()

    def _left(self, call: _Call[Q, A], future: asyncio.Future[A]) -> None:
        """Cancel a call once nobody waits for it."""
        if future.cancelled():
            call.num_wanted -= 1
            if not call.num_wanted and call.task is not None:
                call.task.cancel()
