"""The batch queue: when the model is free, takes the waiting images as a batch.

Unlike ``@serve.batch`` it has no timer: a single image on an idle replica starts at once, and the
next batch grows while one runs. Each network has a queue with three lanes.
:mod:`app.queueing.scheduler` decides when a queue may run a batch.

A backlog doubles the batch size; the larger size is compiled when a backlog first occurs. Larger
batches cost less per image, since the weights are read once for all of them. While few images wait,
a large batch would leave other cores idle, and each image would wait for all. It also takes memory,
which a service without backlogs does not need (decision 0033).
"""

import asyncio
import logging
import math
import time
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any

from app.errors import (
    IN_A_SECOND,
    MORE_TIME,
    DeadlineError,
    NotReadyError,
    OverloadedError,
    UnhealthyError,
)
from app.queueing.fairness import CALLER, LIGHT_S, CoreShare
from app.queueing.scheduler import (
    SHADOW,
    BatchResult,
    BatchScheduler,
    ExecutedBatch,
    Lane,
    PriorityQueue,
    QueueCall,
    QueueReport,
    TimedRows,
    Waiting,
)
from app.setting_values import form_places
from models.ensemble import Probabilities
from models.network import Pixels

logger = logging.getLogger("ray.serve")
RunBatch = Callable[[Sequence[Pixels]], Awaitable[Probabilities | TimedRows]]
SHADOW_RUN_S = 5.0  # the time limit of a batch in the shadow lane, after which it counts as hanging
SHADOW_RUNS = 20  # a shorter limit: this many times the mean time of a batch, but at least 1 s
LAST_RUN_SHARE = 0.1  # the weight of the last run in the moving average of their times
LAST_BATCH_SHARE = 0.05  # the weight of the last batch in the moving average of an image's time
# With as many places one of them is free soon, so batches are whole in any case.
WHOLE_FROM = 4
TIGHT_BATCHES = 4  # a time limit of fewer whole batches is tight
ALONE_S = 1.0  # without an interactive image, after which bulk images count as a backlog too


class BacklogSize:
    """Twice the ``usual`` largest batch size, while enough images wait.

    A backlog fills ``num_places``, the batches that run at a time, at the larger size. ``prepare``
    compiles the network for it, and may raise anything. The log names the member by ``name``.
    """

    def __init__(
        self, name: str, usual: int, num_places: int, prepare: Callable[[], Awaitable[None]]
    ) -> None:
        self.usual, self.size = usual, 2 * usual
        self._name, self._prepare = name, prepare
        # With one place, two batches are a backlog too: the second waits for the first.
        self._num_enough = self.size * max(2, num_places)
        self._is_ready = False
        self._preparing: asyncio.Task[None] | None = None

    def is_due(self, num_waiting: int) -> bool:
        """Whether the next batch should have the larger size, as ``num_waiting`` images wait."""
        return self._is_ready and num_waiting >= self._num_enough

    def waited(self, num: int) -> None:
        """Record how many images waited when a batch was formed; prepare if that is a backlog."""
        if self._preparing is None and num >= self._num_enough:
            self._preparing = asyncio.get_running_loop().create_task(self._be_prepared())

    async def _be_prepared(self) -> None:
        try:
            await self._prepare()
        except Exception as error:
            text = (
                "%s: cannot prepare batches of %d: %s; it continues with batches of %d. Fix the "
                "cause and restart, or set backlog_batches: false"
            )
            logger.warning(text, self._name, self.size, error, self.usual)
        else:
            self._is_ready = True
            logger.info("%s: uses batches of %d while a backlog waits", self._name, self.size)


class BatchQueue:
    """A work-conserving queue in front of one network.

    A batch has the largest size that can be filled: with sizes 1, 4 and 8, of 5 waiting images 4
    leave, since a padded batch costs as much as a full one. Forming a batch drops images whose
    caller has gone or that cannot be answered in time. When a batch fails, its images are run one
    by one, so that only the faulty image fails.

    Args:
        run: takes N images, uint8 (H, W, 3), and returns float32 (N, C), as :class:`TimedRows` if
            the batch may have waited for a thread. N is at most the largest of ``batch_sizes``.
        batch_sizes: the compiled sizes.
        max_queued: how many images may wait.
        scheduler: queues with the same one share the cores.
        on_batch: called with every batch that has run.
        backlog: a larger size while there is a backlog. Bulk images do not count as a backlog
            while interactive images arrive, which would wait for the larger batches.
        share: the model set's share of the scheduler's cores.
    """

    def __init__(
        self,
        run: RunBatch,
        batch_sizes: Iterable[int],
        max_queued: int,
        clock: Callable[[], float] = time.monotonic,
        scheduler: BatchScheduler | None = None,
        on_batch: Callable[[ExecutedBatch], None] = lambda _: None,
        backlog: BacklogSize | None = None,
        share: CoreShare | None = None,
    ) -> None:
        self._run, self._on_batch, self._backlog = run, on_batch, backlog
        self._sizes = sorted(batch_sizes)
        self.max_batch_size = self._sizes[-1]  # this and max_queued may be changed at any time
        self.max_queued = max_queued
        self._clock = clock
        self._tight_at = -math.inf  # when the last image came that allowed less than ``_tight_s``
        self._interactive_at = -math.inf  # when the last interactive image arrived
        self.fastest_s = 0.0  # the shortest time of a batch so far
        self.mean_s = 0.0  # the moving average of the time of a batch
        self.image_s = 0.0  # that of the time of an image in a batch
        self.share = share
        self._scheduler = scheduler or BatchScheduler()
        self.images = PriorityQueue[Waiting](self._scheduler.callers)  # that wait
        self._scheduler.join(self)

    def leave(self) -> list[asyncio.Task[None]]:
        """Leave the scheduler, and fail the waiting images; return the running batches."""
        self._backlog = None
        running = self._scheduler.leave(self)
        for entry in self.images:
            entry.end(None, NotReadyError("the model set was unloaded before the image's turn"))
        return running

    def __len__(self) -> int:
        return len(self.images)

    @property
    def oldest_age_s(self) -> float:
        """The age of the oldest image that a client waits for; 0 if there is none."""
        arrived = (entry.arrived for entry in self.images.answered if not entry.is_gone())
        return max(0.0, self._clock() - min(arrived, default=math.inf))

    def report(self) -> QueueReport:
        return QueueReport(len(self.images), self.oldest_age_s)

    def submit(
        self,
        images: Sequence[Pixels] | Pixels,
        call: QueueCall,
        timeout_s: float = math.inf,
        lane: Lane = "interactive",
    ) -> list[Waiting]:
        """Queue images (H, W, 3), and return an entry for each; takes all of them or none.

        They are not copied. ``call`` is notified of each image's end, and batches passed to
        ``on_batch`` refer to it. An image that has not started within ``timeout_s`` fails.

        Raises:
            OverloadedError: the queue has no room for them.
            DeadlineError: ``timeout_s`` is not a positive number.
        """
        if not timeout_s > 0:  # NaN too
            raise DeadlineError(
                f"timeout of {timeout_s} s: no time is left for this image; {MORE_TIME}"
            )
        now = self._clock()
        caller = CALLER.get()
        share = self._scheduler.callers.asks(caller, now)
        self._check_room(len(images), lane, share)
        added = [Waiting(image, call, now, now + timeout_s, share) for image in images]
        if lane == "interactive":
            self._interactive_at = now
            # Not without a key, as of light callers: anybody could make all batches small.
            if caller.has_key and timeout_s < self._tight_s:
                self._tight_at = now
            self.images.interactive.add(added)
        else:
            self.images.lane(lane).add(added)
        self._scheduler.call()
        return added

    def _check_room(self, num_images: int, lane: Lane, share: CoreShare) -> None:
        """Raise :class:`OverloadedError` if there is no room, nor any that is the caller's own.

        Images of the shadow lane do not take the room of images in other lanes.
        """
        places = self.max_queued if num_images == 1 else form_places(self.max_queued)
        if num_images <= places - self._num_queued(lane):
            return
        self.images.forget_the_gone()
        if num_images > places - (num_queued := self._num_queued(lane)):
            num_own = num_images + sum(entry.share is share for entry in self.images)
            if num_own <= places * self._scheduler.callers.part_of(share):
                return
            text = f"{num_queued} images are queued, and {num_images} more exceed the limit of"
            kept = " (the rest is kept for single images)" if places < self.max_queued else ""
            raise OverloadedError(f"{text} {places}{kept}; {IN_A_SECOND}")

    def _num_queued(self, lane: Lane) -> int:
        return len(self.images.shadow if lane == SHADOW else self.images)

    def would_grow(self, num_more: int, within_s: float) -> bool:
        """Whether the next batch would be larger if ``num_more`` images arrived ``within_s``.

        False if a waiting image would miss its deadline by then.
        """
        if self._is_hasty:
            return False
        if self._size_for(len(self.images) + num_more) <= self._size_for(len(self.images)):
            return False
        ends = self._clock() + within_s + self.fastest_s
        return all(entry.expires > ends for entry in self.images)

    @property
    def has_whole_batch(self) -> bool:
        """Whether interactive images fill the largest usual batch, and none larger is near.

        A larger one is near if there is a backlog size, and the images fill twice the usual batch.
        """
        num = len(self.images.interactive)
        is_one = num >= self.max_batch_size
        if not is_one or (self._backlog is not None and num >= 2 * self.max_batch_size):
            return False
        return not self._is_hasty

    def take(self, *, of_shadow: bool = False) -> Coroutine[Any, Any, None] | None:
        """Form a batch of the waiting images, or of those ``of_shadow``, and return its run.

        None if none waits. Also None if the first image of a lane was cancelled: then another queue
        may be next.
        """
        self._end_the_late()
        images = self.images
        if images.forget_the_gone():
            return None
        if of_shadow:  # few: clients' images may have to wait for them
            num = min(len(images.shadow), self._sizes[0])
            return self._answer_shadow([images.shadow.popleft() for _ in range(num)])
        num_waiting, num_bulk = len(images), len(images.bulk)
        size, image_s = self._size_for(num_waiting), self.image_s
        if not (batch := [images.pop(image_s) for _ in range(size)]):
            return None
        if self._backlog is not None and num_waiting > size:
            self._backlog.waited(num_waiting - (num_bulk if self._is_beside_interactive() else 0))
        return self._answer(batch)

    def _end_the_late(self) -> None:
        now = self._clock()
        latest = now + self.fastest_s
        for entry in self.images:
            if entry.expires <= latest:
                waited = now - entry.arrived
                text = f"the deadline passed, or is too close, after {waited:.3f} s in the queue"
                entry.end(None, DeadlineError(f"{text}; {MORE_TIME}"))

    def _size_for(self, num_waiting: int) -> int:
        """Return the largest size that ``num_waiting`` images fill, or their number if none."""
        if self._is_hasty:
            share = min(1.0, self._scheduler.num_at_once / WHOLE_FROM)
            most = max(1, int(share * self.max_batch_size))
            return self._filled(self._num_hasty or min(num_waiting, most))
        backlog = self._backlog
        if backlog and backlog.usual <= self.max_batch_size < num_waiting:
            num_beside = len(self.images.bulk) if self._is_beside_interactive() else 0
            if backlog.is_due(num_waiting - num_beside):
                return backlog.size
        return self._filled(num_waiting)

    @property
    def _tight_s(self) -> float:
        """A time limit that an image would miss behind whole batches and in one."""
        return TIGHT_BATCHES * self.max_batch_size * self.image_s

    @property
    def _is_hasty(self) -> bool:
        """Whether images should not wait for whole batches: of a light caller, or with no time."""
        callers, now = self._scheduler.callers, self._clock()
        return now - self._tight_at < LIGHT_S or (callers.are_several and callers.has_light(now))

    @property
    def _num_hasty(self) -> int:
        """How many of the images that wait in the next lane should not."""
        if num := self.images.num_light:
            return num
        until = self._clock() + self._tight_s
        return sum(entry.expires < until for entry in self.images.interactive)

    def _filled(self, num_images: int) -> int:
        most = min(num_images, self.max_batch_size)
        num_filled = bisect_right(self._sizes, most)
        return self._sizes[num_filled - 1] if num_filled else most

    def _is_beside_interactive(self) -> bool:
        """Whether interactive images arrived lately, which would wait for larger batches."""
        return self._clock() - self._interactive_at < ALONE_S

    async def _answer(self, batch: list[Waiting], *, is_again: bool = False) -> None:
        started = self._clock()
        try:
            ran = await self._run([entry.image for entry in batch])
            timed = ran if isinstance(ran, TimedRows) else TimedRows(ran, started, self._clock())
            rows, started = timed.rows, timed.started
            if len(rows) != len(batch):
                raise RuntimeError(f"network returned {len(rows)} rows for {len(batch)} images")
        except Exception as error:
            self._charge(self._executed(batch, started, self._clock(), error), is_again)
            if len(batch) == 1:
                batch[0].end(None, error)
                return
            for entry in batch:
                if not entry.is_over:
                    await self._answer([entry], is_again=True)
            return
        executed = self._executed(batch, started, timed.ended)
        self.fastest_s = min(self.fastest_s or executed.infer_s, executed.infer_s)
        taken_s = executed.infer_s / executed.size
        self.image_s += LAST_BATCH_SHARE * (taken_s - self.image_s) if self.image_s else taken_s
        self._charge(executed, is_again)
        features = [None] * len(batch) if timed.features is None else timed.features
        for entry, row, own in zip(batch, rows, features, strict=True):
            entry.end(BatchResult(row, started - entry.arrived, executed, own))

    def _charge(self, executed: ExecutedBatch, is_again: bool) -> None:
        """Update the mean time of a batch, which the share is charged; failed runs count too.

        A run after a failed one (``is_again``) had no turn, so it is charged here.
        """
        if is_again:
            self._scheduler.charge(self.share, executed.infer_s)
        before = self.mean_s or executed.infer_s
        self.mean_s = before + LAST_RUN_SHARE * (executed.infer_s - before)

    async def _answer_shadow(self, batch: list[Waiting]) -> None:
        """Run a batch of the shadow lane; if it hangs it frees its place, but not its thread."""
        most_s = SHADOW_RUN_S
        if self.mean_s:
            most_s = min(most_s, max(1.0, SHADOW_RUNS * self.mean_s))
        try:
            async with asyncio.timeout(most_s):
                await self._answer(batch)
        except TimeoutError:
            hangs = UnhealthyError(f"a batch of the shadow has run for {most_s:.3g} s: it hangs")
            for entry in batch:
                entry.end(None, hangs)

    def _executed(
        self, batch: list[Waiting], started: float, ended: float, error: Exception | None = None
    ) -> ExecutedBatch:
        calls = [entry.call for entry in batch]
        executed = ExecutedBatch(started, ended, calls, error)
        self._on_batch(executed)
        return executed
