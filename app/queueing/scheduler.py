"""Schedules the batches of several queues on the same cores, by lane, age and share.

Members in a process share its cores by taking turns. With cores of its own for each member, those
of the faster member would be idle while images wait for the slower one.

If images are decoded on the same cores, a batch waits a little for images that are being decoded,
as long as decoding keeps every core busy: a larger batch costs less per image.

A full batch can be formed ahead, while all cores are busy. The thread whose batch ends first begins
it at once, without waiting for the event loop.

Each queue has three lanes. A form of 64 files must not delay a single photo, so interactive images
go first. Every ``BULK_EVERY``-th turn is for bulk images if any wait, so that they do not starve.
No client waits for images of the shadow lane: they only get a turn while no others wait.

Model sets may have weighted shares of the cores, by start-time fair queueing (Goyal, Vin and Cheng,
1996). Each set has a virtual time, which a batch advances by its seconds divided by the set's
weight. The set with the lowest virtual time runs the next batch. A set that was idle starts at the
present virtual time, so that it gets no credit for being idle.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

from models.ensemble import Probabilities
from models.network import Pixels

MAX_HOLD_S = 0.05  # how long a batch waits; one core decodes eight photos in half of it
# At this rate decoding takes half of the event loop's time. If the networks are faster, threads
# decode.
LOOP_IMAGES_PER_S = 250


class CoreShare:
    """The weight and virtual time of a model set, which all its queues share."""

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight
        self.ends = 0.0  # when the set's last batch ends, in virtual seconds


class VirtualClock:
    """Computes when a batch of each share would begin, in virtual seconds of one scheduler."""

    def __init__(self) -> None:
        self._now = 0.0  # when the last batch began
        self._latest_end = 0.0  # the latest end of any batch

    def begins(self, share: CoreShare | None) -> float:
        """Return when the next batch of a share would begin; 0 without a share."""
        return 0.0 if share is None else max(self._now, share.ends)

    def taken(self, share: CoreShare | None, seconds: float) -> None:
        """Charge a share for a batch that takes about ``seconds``."""
        if share is not None:
            self._now = max(self._now, share.ends)
            self.charged(share, seconds)

    def charged(self, share: CoreShare, seconds: float) -> None:
        """Charge a share for time beyond its turns."""
        share.ends = max(self._now, share.ends) + seconds / share.weight
        self._latest_end = max(self._latest_end, share.ends)

    def idle(self) -> None:
        """End a busy period, so that no share's use in it counts later."""
        self._now = self._latest_end


Lane = Literal["interactive", "bulk", "shadow"]


class Entry(Protocol):
    """An entry of a lane."""

    def is_gone(self) -> bool:
        """Whether nobody waits for the entry any more."""


T = TypeVar("T", bound=Entry)


class PriorityQueue(Generic[T]):
    """A queue for each lane, in order of arrival; callers may read the lanes, not change them."""

    def __init__(self) -> None:
        self.interactive: deque[T] = deque()
        self.bulk: deque[T] = deque()
        self.shadow: deque[T] = deque()
        self._turns = LaneTurns()

    def lane(self, name: Lane) -> deque[T]:
        if name == "interactive":
            return self.interactive
        return self.bulk if name == "bulk" else self.shadow

    def __len__(self) -> int:
        """How many entries compete for the next turns; the shadow lane's only if no others wait."""
        return len(self.interactive) + len(self.bulk) or len(self.shadow)

    @property
    def num_answered(self) -> int:
        """How many entries wait outside of the shadow lane."""
        return len(self.interactive) + len(self.bulk)

    @property
    def answered(self) -> Iterator[T]:
        """The entries outside of the shadow lane."""
        return chain(self.interactive, self.bulk)

    @property
    def is_shadow_only(self) -> bool:
        """Whether entries wait in the shadow lane and in no other."""
        return bool(self.shadow) and not self.interactive and not self.bulk

    def __iter__(self) -> Iterator[T]:
        return chain(self.interactive, self.bulk, self.shadow)

    def extend(self, entries: Iterable[T], lane: Lane) -> None:
        self.lane(lane).extend(entries)

    def pop(self) -> T:
        if not self.interactive and not self.bulk:
            return self.shadow.popleft()
        lane = self._turns.next(interactive=bool(self.interactive), bulk=bool(self.bulk))
        self._turns.taken(lane)
        return (self.bulk if lane == "bulk" else self.interactive).popleft()

    def forget_the_gone(self) -> bool:
        """Remove the entries whose callers have gone; return whether one was first in its lane."""
        lanes = (self.interactive, self.bulk, self.shadow)
        is_first_gone = False
        for entries in lanes:
            if entries and any(entry.is_gone() for entry in entries):
                is_first_gone = is_first_gone or entries[0].is_gone()
                left = [entry for entry in entries if not entry.is_gone()]
                entries.clear()
                entries.extend(left)
        return is_first_gone


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

    __slots__ = ("arrived", "call", "error", "expires", "image", "is_over", "result")

    def __init__(self, image: Pixels, call: QueueCall, arrived: float, expires: float) -> None:
        self.image, self.call, self.arrived, self.expires = image, call, arrived, expires
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

    def take(self) -> Coroutine[Any, Any, None] | None:
        """Form the next batch and return its run, not yet started.

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
    """Gives each free place to the queue whose image is next: by lane, by share, then by age.

    Lanes have their turns across all queues, so that a form for one member does not delay a photo
    for another. The shadow lane has a turn only while no others wait in any queue. Within a lane,
    queues with a share take turns by their virtual times first.

    ``num_at_once`` batches run at a time, each on ``threads_each`` cores. ``num_ahead`` may be
    formed while all places are busy, and must be run in the order in which they were formed.
    """

    def __init__(self, num_at_once: int = 1, threads_each: int = 1, num_ahead: int = 0) -> None:
        self.num_ahead = num_ahead
        self._num_at_once, self._threads_each = num_at_once, threads_each
        self._queues: list[Queue] = []
        self._turns, self._virtual = LaneTurns(), VirtualClock()
        self._source: ImageSource | None = None
        self._running: dict[asyncio.Task[None], Queue] = {}
        # One batch of the shadow at a time: a network that hangs must not take all places.
        self._of_shadow: asyncio.Task[None] | None = None
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
        num_cores = self._num_at_once * self._threads_each
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
        return not image_s or self._num_at_once / image_s <= LOOP_IMAGES_PER_S

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
            if (run := queue.take()) is None:
                continue
            task = asyncio.get_running_loop().create_task(run)
            if lane == SHADOW:
                self._of_shadow = task
            else:
                self._turns.taken(lane)
                self._virtual.taken(queue.share, queue.mean_s)
            if queue is self._held:
                self._end_hold()
            self._running[task] = queue
            task.add_done_callback(self._ended)

    def _next(self) -> tuple[Lane, Queue] | None:
        """Return the lane and queue of the next batch; None if no place is free."""
        num_over = len(self._running) - self._num_at_once
        if num_over >= self.num_ahead and num_over >= 0:
            return None
        waiting = self._with_images()
        if num_over < 0:
            return self._first(self._ready(waiting)) or self._first_shadow(waiting)
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

    def _order(self, queue: Queue, images: Sequence[Waiting]) -> tuple[float, float]:
        """Return the key by which queues take turns: the share's virtual time, then age."""
        return self._virtual.begins(queue.share), images[0].arrived

    def _first_shadow(self, waiting: list[Queue]) -> tuple[Lane, Queue] | None:
        """Return the queue of the oldest image in the shadow lane, if no other lane has images."""
        if self._of_shadow is not None or waiting:
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
        num_running = min(len(self._running), self._num_at_once)
        num_busy = num_running * self._threads_each + self._source.num_busy
        num_cores = self._num_at_once * self._threads_each
        return self._source.num_coming if num_busy >= num_cores else 0

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Remove a finished batch from the running ones and start waiting ones; tasks call this."""
        if task is self._of_shadow:
            self._of_shadow = None
        self._running.pop(task, None)
        self._give_turns()
        if not self._running and not self._with_images():
            self._virtual.idle()


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


class QueueReport(NamedTuple):
    """The state of a queue, for metrics."""

    num_waiting: int
    oldest_age_s: float  # how long the oldest image has waited
