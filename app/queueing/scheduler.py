"""Schedules the batches of several queues on the same cores, by lane, share and deadline.

Members in a process share its cores by taking turns. With cores of its own for each member, those
of the faster member would be idle while images wait for the slower one.

If images are decoded on the same cores, a batch waits a little for images that are being decoded,
as long as decoding keeps every core busy: a larger batch costs less per image.

A full batch can be formed ahead, while all cores are busy. The thread whose batch ends first begins
it at once, without waiting for the event loop.

Each queue has three lanes. A form of 64 files must not delay a single photo, so interactive images
go first. Every ``BULK_EVERY``-th turn is for bulk images if any wait, so that they do not starve.
Images of the shadow lane, which no client waits for, get a turn while no others wait, or when they
are due (``copy_is_due``): :class:`app.traffic.graph.ShadowLane` decides that.

Model sets have weighted shares of the cores, and callers of each lane
(:mod:`app.queueing.fairness`).
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from itertools import chain
from typing import Any, Generic, Literal, NamedTuple, Protocol

from app.queueing.fairness import FAR_S, CallerShares, CoreShare, FairLane, T, VirtualClock
from models.ensemble import Probabilities
from models.network import Features, Pixels

MAX_HOLD_S = 0.05  # how long a batch waits; one core decodes eight photos in half of it
# At this rate decoding takes half of the event loop's time. If the networks are faster, threads
# decode.
LOOP_IMAGES_PER_S = 250


NUM_PAUSES, MOST_PAUSES = 64, 0.8  # how many pauses are kept; the share that is most of them


class Pauses:
    """The times that clients leave the machine idle: two of its places, or all if it has fewer."""

    def __init__(self) -> None:
        self._began: float | None = -math.inf  # of the present pause
        self._lasted_s: deque[float] = deque(maxlen=NUM_PAUSES)

    def note(self, now: float, *, is_busy: bool) -> None:
        """Take note whether clients keep the machine busy from now on."""
        if is_busy and self._began is not None:
            self._lasted_s.append(now - self._began)
            self._began = None
        elif not is_busy and self._began is None:
            self._began = now

    def has_room_for(self, seconds: float, now: float) -> bool:
        """Whether a pause has lasted so long, and will probably last as long again.

        It will if most earlier pauses did that lasted as long as the present one has.
        """
        idle_s = 0.0 if self._began is None else now - self._began
        if idle_s < seconds:
            return False
        longer = [lasted_s for lasted_s in self._lasted_s if lasted_s > idle_s]
        num_enough = sum(lasted_s > idle_s + seconds for lasted_s in longer)
        return num_enough >= MOST_PAUSES * len(longer)


Lane = Literal["interactive", "bulk", "shadow"]


class PriorityQueue(Generic[T]):
    """A queue for each lane, in which callers have turns; others may read the lanes alone."""

    def __init__(self, shares: CallerShares | None = None) -> None:
        self._shares = shares = shares or CallerShares()
        self.interactive = FairLane[T](shares)
        self.bulk = FairLane[T](shares)
        self.shadow = FairLane[T](CallerShares())
        self._turns = LaneTurns()

    def lane(self, name: Lane) -> FairLane[T]:
        if name == "interactive":
            return self.interactive
        return self.bulk if name == "bulk" else self.shadow

    def __len__(self) -> int:
        """How many entries wait outside of the shadow lane."""
        return len(self.interactive) + len(self.bulk)

    @property
    def num_light(self) -> int:
        """How many entries of light callers wait in the lane that is next."""
        return self.interactive.num_light or self.bulk.num_light

    @property
    def answered(self) -> Iterator[T]:
        """The entries outside of the shadow lane."""
        return chain(self.interactive, self.bulk)

    def __iter__(self) -> Iterator[T]:
        return chain(self.interactive, self.bulk, self.shadow)

    def pop(self, cost_s: float = 0.0) -> T:
        """Take the next entry outside of the shadow lane; its caller is charged ``cost_s``."""
        lane = self._turns.next(interactive=bool(self.interactive), bulk=bool(self.bulk))
        self._turns.taken(lane)
        entries = self.bulk if lane == "bulk" else self.interactive
        return entries.take(cost_s) if self._shares.are_several else entries.popleft()

    def forget_the_gone(self) -> bool:
        """Remove the entries whose callers have gone; return whether one was next in its lane."""
        lanes = (self.interactive, self.bulk, self.shadow)
        is_next_gone = False
        for entries in lanes:
            if entries and any(entry.is_gone() for entry in entries):
                is_next_gone = is_next_gone or entries.next.is_gone()
                left = [entry for entry in entries if not entry.is_gone()]
                entries.clear()
                entries.extend(left)
        return is_next_gone


class ExecutedBatch:
    """A batch that has run; compared by identity. Times are by the queue's clock."""

    __slots__ = ("__weakref__", "calls", "ended", "error", "infer_s", "size", "started")

    def __init__(
        self,
        started: float,
        ended: float,
        calls: Sequence["QueueCall"],
        error: Exception | None = None,
    ) -> None:
        self.started, self.ended, self.error = started, ended, error
        self.calls = calls  # for each image, the call that queued it
        self.size, self.infer_s = len(calls), ended - started


class BatchResult(NamedTuple):
    """One image's part of a batch."""

    probabilities: Probabilities  # (C,)
    queued_s: float  # from submission to the start of its batch
    batch: ExecutedBatch
    features: Features | None = None  # (F,), if the network has them


class QueueCall(Protocol):
    """A call whose images are in the queue."""

    def image_ended(self, entry: "Waiting") -> None:
        """Take an image's result or error; called on the loop, as soon as it has one.

        Other images of its batch may not have theirs yet.
        """


class Waiting:
    """An image (H, W, 3) in the queue, which expires at ``expires`` by the queue's clock.

    ``call`` is notified once of its result or error, unless it has left the queue before.
    """

    __slots__ = (
        "arrived",
        "call",
        "due",
        "error",
        "expires",
        "image",
        "is_over",
        "result",
        "share",
    )

    def __init__(
        self, image: Pixels, call: QueueCall, arrived: float, expires: float, share: CoreShare
    ) -> None:
        self.image, self.call, self.arrived, self.expires = image, call, arrived, expires
        self.share = share  # its caller's
        self.due = expires if expires < arrived + FAR_S else arrived + FAR_S
        self.is_over = False  # answered, failed, or its caller has gone
        self.result: BatchResult | None = None
        self.error: BaseException | None = None

    def is_gone(self) -> bool:
        """Whether nobody waits for the image: its caller has gone, or has an answer."""
        return self.is_over

    def leave(self) -> None:
        """Mark the image as not wanted any more; the next batch drops it."""
        self.is_over = True

    def end(self, result: BatchResult | None, error: BaseException | None = None) -> None:
        """Pass the result or the error to the call, unless the image is over."""
        if not self.is_over:
            self.is_over, self.result, self.error = True, result, error
            self.call.image_ended(self)


class Queue(Protocol):
    """A queue that takes turns with others: it has batches to run."""

    share: CoreShare | None  # the set's share of the cores; None: turns go by age alone
    mean_s: float  # the mean time of its latest batches
    image_s: float  # a core's mean time for an image, in the latest batches; 0 before the first
    max_batch_size: int
    images: PriorityQueue[Waiting]  # that wait

    def take(self, *, of_shadow: bool) -> Coroutine[Any, Any, None] | None:
        """Form the next batch, or one of the shadow lane, and return its run, not yet started.

        None if the next image was cancelled; call again.
        """

    def would_grow(self, num_more: int, within_s: float) -> bool:
        """Whether ``num_more`` images ``within_s`` enlarge the next batch, and none is too late."""

    @property
    def has_whole_batch(self) -> bool:
        """Whether interactive images fill a batch that would not get larger by waiting."""


class ImageSource(Protocol):
    """A decoder that supplies the queues with images, on the same cores."""

    @property
    def num_busy(self) -> int:
        """How many cores decoding keeps busy."""

    @property
    def num_coming(self) -> int:
        """How many images wait to be decoded, or are being decoded."""

    def on_decoded(self, call: Callable[[], None]) -> None:
        """Register a function that is called on the loop whenever decoding an image has ended."""


class BatchScheduler:
    """Gives each free place to the queue whose image is next: by lane, share, caller and deadline.

    Lanes have their turns across all queues, so that a form for one member does not delay a photo
    for another. The shadow lane has a turn while no others wait in any queue, or before them if
    ``copy_is_due``. Within a lane, queues with a share take turns by their virtual times first.

    ``num_at_once`` batches run at a time, each on ``threads_each`` cores. ``num_ahead`` may be
    formed while all places are busy, and must be run in the order in which they were formed.
    """

    def __init__(self, num_at_once: int = 1, threads_each: int = 1, num_ahead: int = 0) -> None:
        self.num_ahead = num_ahead
        self.num_at_once, self._threads_each = num_at_once, threads_each
        self._queues: list[Queue] = []
        self._turns, self._virtual = LaneTurns(), VirtualClock()
        self.callers = CallerShares()  # of all queues
        self._source: ImageSource | None = None
        self._running: dict[asyncio.Task[None], Queue] = {}
        # One batch of the shadow at a time: a network that hangs must not take all places.
        self._of_shadow: asyncio.Task[None] | None = None
        self.copy_is_due = self._was_copy = False  # the latter: of the batch that began last
        self.pauses = Pauses()
        self._is_called = False
        # The queue whose batch would grow. The timer ends its wait, whatever other queues run;
        # from then on no queue waits until that one has been taken.
        self._held: Queue | None = None
        self._hold: asyncio.TimerHandle | None = None
        self._is_hold_over = False

    def join(self, queue: Queue) -> None:
        """Let ``queue`` take turns with the others."""
        self._queues.append(queue)

    def leave(self, queue: Queue) -> list[asyncio.Task[None]]:
        """Remove ``queue`` from the turns, and return its running batches."""
        self._queues.remove(queue)
        return [task for task, of in self._running.items() if of is queue]

    def charge(self, share: CoreShare | None, seconds: float) -> None:
        """Charge a share for a run beyond that of its turn."""
        if share is not None:
            self._virtual.charged(share, seconds)

    def share_cores_with(self, source: ImageSource | None) -> None:
        """Let batches wait for images that ``source`` decodes while all cores are busy.

        None: batches do not wait any more.
        """
        self._source = source
        if source is not None:
            source.on_decoded(self.call)

    def leaves_loop_time(self, share: CoreShare | None) -> bool:
        """Whether the event loop has time to decode a photo for the set with this ``share``.

        It has none while images wait that fill a batch on each core, nor for networks so fast that
        decoding would take half of the loop's time.
        """
        num_cores = self.num_at_once * self._threads_each
        num_waiting, image_s = 0, 0.0
        for queue in self._queues:
            num = len(queue.images.interactive) + len(queue.images.bulk)
            if num >= num_cores * queue.max_batch_size:
                return False
            num_waiting += num
            # Every image passes all members of its set, which share the cores: their times add up.
            if queue.share is share:
                image_s += queue.image_s
        if not num_waiting and not self._running:
            return True
        return not image_s or self.num_at_once / image_s <= LOOP_IMAGES_PER_S

    def call(self) -> None:
        """Request turns because images wait; they are given at the end of this turn of the loop.

        So images that arrive in one turn of the loop share a batch.
        """
        if not self._is_called:
            self._is_called = True
            asyncio.get_running_loop().call_soon(self._give_turns)

    def _give_turns(self) -> None:
        self._is_called = False
        while turn := self._next():
            lane, queue = turn
            if (run := queue.take(of_shadow=lane == SHADOW)) is None:
                continue
            task = asyncio.get_running_loop().create_task(run)
            if lane == SHADOW:
                self._of_shadow = task
            else:
                self._turns.taken(lane)
                self._virtual.taken(queue.share, queue.mean_s)
            if queue is self._held:
                self._end_hold()
            self._was_copy = lane == SHADOW
            self._running[task] = queue
            task.add_done_callback(self._ended)
        num_of_clients = len(self._running) - (self._of_shadow is not None)
        is_busy = num_of_clients > max(0, self.num_at_once - 2) or bool(self._with_images())
        self.pauses.note(asyncio.get_running_loop().time(), is_busy=is_busy)

    def _next(self) -> tuple[Lane, Queue] | None:
        """Return the lane and queue of the next batch; None if no place is free."""
        num_over = len(self._running) - self.num_at_once
        if num_over >= self.num_ahead and num_over >= 0:
            return None
        waiting = self._with_images()
        if num_over < 0:
            # A copy of a form is up to eight images: clients wait for one of them at a time.
            is_due = self.copy_is_due and not (self._was_copy and waiting)
            if is_due and (turn := self._first_shadow()):
                return turn
            turn = self._first(self._ready(waiting))
            return turn if turn or waiting else self._first_shadow()
        # Only the queue that is next may form a batch ahead; otherwise one could delay all others.
        turn = self._first(waiting)
        return turn if turn and turn[1].has_whole_batch else None

    def _with_images(self) -> list[Queue]:
        """Return the queues with images that clients wait for."""
        return [each for each in self._queues if each.images.interactive or each.images.bulk]

    def _first(self, queues: Sequence[Queue]) -> tuple[Lane, Queue] | None:
        """Return the lane and queue of the image that is next among ``queues``."""
        if not queues:
            return None
        interactive = [queue for queue in queues if queue.images.interactive]
        bulk = [queue for queue in queues if queue.images.bulk]
        lane = self._turns.next(interactive=bool(interactive), bulk=bool(bulk))
        if lane == "bulk":
            return lane, min(bulk, key=lambda each: self._order(each, each.images.bulk))
        if len(interactive) == 1:
            return lane, interactive[0]
        return lane, min(interactive, key=lambda each: self._order(each, each.images.interactive))

    def _order(self, queue: Queue, images: FairLane[Waiting]) -> tuple[float, ...]:
        """Return the key by which queues take turns: virtual times of set and caller, deadline."""
        if not self.callers.are_several:
            return self._virtual.begins(queue.share), images[0].due
        return self._virtual.begins(queue.share), *images.order

    def _first_shadow(self) -> tuple[Lane, Queue] | None:
        """Return the queue of the oldest image in the shadow lane, unless one of them runs."""
        if self._of_shadow is not None:
            return None
        of_shadow = [queue for queue in self._queues if queue.images.shadow]
        if not of_shadow:
            return None
        return SHADOW, min(of_shadow, key=lambda queue: queue.images.shadow[0].arrived)

    def _ready(self, waiting: list[Queue]) -> list[Queue]:
        """Return those of ``waiting`` whose batch would not get larger by waiting a little."""
        if self._held is not None and self._held not in waiting:
            self._end_hold()  # the images that it was for are gone
        if not waiting or not (num_coming := self._num_worth_waiting_for()):
            return waiting
        held = [queue for queue in waiting if queue.would_grow(num_coming, MAX_HOLD_S)]
        if held and self._held is None:
            self._held = held[0]
            self._hold = asyncio.get_running_loop().call_later(MAX_HOLD_S, self._hold_over)
        return [queue for queue in waiting if queue not in held]

    def _end_hold(self) -> None:
        self._held, self._is_hold_over = None, False
        if self._hold is not None:
            self._hold.cancel()
            self._hold = None

    def _hold_over(self) -> None:
        self._hold, self._is_hold_over = None, True
        self._give_turns()

    def _num_worth_waiting_for(self) -> int:
        """Return how many images are being decoded; 0 if a core would be idle until they are."""
        if self._source is None or self._is_hold_over:
            return 0
        num_running = min(len(self._running), self.num_at_once)
        num_busy = num_running * self._threads_each + self._source.num_busy
        num_cores = self.num_at_once * self._threads_each
        return self._source.num_coming if num_busy >= num_cores else 0

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Remove a finished batch from the running ones and start waiting ones; tasks call this."""
        if task is self._of_shadow:
            self._of_shadow = None
        self._running.pop(task, None)
        self._give_turns()
        if not self._running and not self._with_images():
            self._virtual.idle()
            if self.callers.are_several:
                self.callers.clock.idle()


LANES: tuple[Lane, ...] = ("interactive", "bulk")  # of images that clients wait for
SHADOW: Lane = "shadow"  # used within a process only
BULK_EVERY = 8


class LaneTurns:
    """Chooses the next lane: interactive, and every ``BULK_EVERY``-th turn bulk, if any wait."""

    def __init__(self) -> None:
        self._since_bulk = 0  # interactive turns since bulk last had one

    def next(self, *, interactive: bool, bulk: bool) -> Lane:
        """Return the next lane; the arguments say in which lanes entries wait."""
        if bulk and (not interactive or self._since_bulk >= BULK_EVERY - 1):
            return "bulk"
        return "interactive"

    def taken(self, lane: Lane) -> None:
        self._since_bulk = 0 if lane == "bulk" else self._since_bulk + 1


class TimedRows(NamedTuple):
    """The result of a batch with the times at which a thread ran it, without waiting."""

    rows: Probabilities  # (N, C)
    started: float  # both times are by the queue's clock
    ended: float
    features: Features | None = None  # (N, F), if the network has them


class QueueReport(NamedTuple):
    """The state of a queue, for metrics."""

    num_waiting: int
    oldest_age_s: float  # how long the oldest image has waited
