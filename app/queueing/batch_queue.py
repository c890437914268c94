"""The batch queue: waits until the model is free, then takes what is there.

Unlike ``@serve.batch`` there is no timer: a lone image on an idle replica starts at once, and while
a batch runs the next one grows. One queue per network, in two lanes;
:mod:`app.queueing.scheduler` says how many batches run at a time.
"""

import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any

from app.errors import IN_A_SECOND, MORE_TIME, DeadlineError, OverloadedError
from app.queueing.backlog_size import BacklogSize
from app.queueing.batch_records import (
    BatchResult,
    ExecutedBatch,
    QueueCall,
    QueueReport,
    TimedRows,
    Waiting,
)
from app.queueing.priority import Lane, PriorityQueue
from app.queueing.scheduler import BatchScheduler
from app.setting_values import form_places
from models.ensemble import Probabilities
from models.runtime import Pixels

RunBatch = Callable[[Sequence[Pixels]], Awaitable[Probabilities | TimedRows]]
ALONE_S = 1.0  # since the last interactive image; from then on bulk images are a backlog too


class BatchQueue:
    """A work-conserving queue in front of one network.

    ``run`` takes N images, uint8 (H, W, 3), N up to the largest of ``batch_sizes``, and gives
    float32 (N, C); with the times at which it ran, if it may have waited for a thread.
    A batch is the largest of the sizes that can be filled: of 5 waiting images 4 go, since a padded
    batch costs as much as a full one. Callers that went away or that cannot be answered in time are
    dropped when a batch is formed; when a batch fails, its images are run one by one, so that only
    the one at fault fails. Queues with the same ``scheduler`` share the cores. With ``backlog``
    batches have its size too, while there is one; bulk images are none while interactive ones come,
    which would wait for those larger batches.
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
    ) -> None:
        self._run, self._on_batch, self._backlog = run, on_batch, backlog
        self._sizes = sorted(batch_sizes)
        self.max_batch_size = self._sizes[-1]  # both may be changed while the queue works
        self.max_queued = max_queued
        self._clock = clock
        self._waiting: PriorityQueue[Waiting] = PriorityQueue()
        self._num_batches = self._num_images = self._num_places = 0
        self._interactive_at = -math.inf  # when the last of them came
        self.fastest_s = 0.0  # of all runs: no batch takes less
        self._scheduler = scheduler or BatchScheduler()
        self._scheduler.join(self)

    def __len__(self) -> int:
        return len(self._waiting)

    def waiting_since(self, lane: Lane) -> float | None:
        """When the image that waits longest in a lane arrived, by the clock; None: none waits."""
        head = self._waiting.head(lane)
        return None if head is None else head.arrived

    @property
    def oldest_age_s(self) -> float:
        """How long the longest waiting image has waited; 0 when none waits."""
        arrived = (entry.arrived for entry in self._waiting if not entry.is_gone())
        return max(0.0, self._clock() - min(arrived, default=math.inf))

    def report(self) -> QueueReport:
        """Return the queue's length, age and how full its batches were."""
        fill = self._num_images / self._num_places if self._num_places else 0.0
        return QueueReport(len(self), self.oldest_age_s, self._num_batches, self._num_images, fill)

    def submit(
        self,
        images: Sequence[Pixels] | Pixels,
        call: QueueCall,
        timeout_s: float = math.inf,
        lane: Lane = "interactive",
    ) -> list[Waiting]:
        """Queue images (H, W, 3), an entry for each; all of them fit or none is taken.

        Args:
            images: they are not copied.
            call: hears of the end of each; :class:`ExecutedBatch` names it to ``on_batch``.
            timeout_s: the time left to them; one that has not started by then fails.
            lane: in which they wait.

        Raises:
            OverloadedError: the queue has no room for them.
            DeadlineError: ``timeout_s`` is not a positive number.

        """
        if not timeout_s > 0:  # NaN too
            raise DeadlineError(
                f"timeout of {timeout_s} s: no time is left for this image; {MORE_TIME}"
            )
        self._check_room(len(images))
        now = self._clock()
        added = [Waiting(image, call, now, now + timeout_s) for image in images]
        self._waiting.extend(added, lane)
        if lane == "interactive":
            self._interactive_at = now
        self._scheduler.call()
        return added

    def _check_room(self, num_images: int) -> None:
        places = self.max_queued if num_images == 1 else form_places(self.max_queued)
        if num_images > places - len(self._waiting):
            self._waiting.forget_the_gone()
        if num_images > places - len(self._waiting):
            text = f"{len(self._waiting)} images are queued, {num_images} more do not fit into"
            kept = " (the other places are for single images)" if places < self.max_queued else ""
            raise OverloadedError(f"{text} {places}{kept}; {IN_A_SECOND}")

    def would_grow(self, num_more: int, within_s: float) -> bool:
        """Whether the next batch would be larger if so many more images came ``within_s``.

        Not if one that waits would be too late by then.
        """
        ends = self._clock() + within_s + self.fastest_s
        if any(entry.expires <= ends for entry in self._waiting.heads()):
            return False
        return self._size_for(len(self._waiting) + num_more) > self._size_for(len(self._waiting))

    @property
    def has_whole_batch(self) -> bool:
        """Whether interactive images fill the largest usual batch, and no larger one is near.

        With a backlog's size as many images again may soon make a batch of twice the size.
        """
        num = self._waiting.num_ahead("interactive")
        is_one = num >= self.max_batch_size
        return is_one and (self._backlog is None or num < 2 * self.max_batch_size)

    def take(self) -> Coroutine[Any, Any, None] | None:
        """Form a batch of what somebody still wants and return its run; None if there is none."""
        self._drop_the_late()
        self._waiting.forget_the_gone()
        num_waiting, num_beside = len(self._waiting), self._num_bulk_beside()
        size = self._size_for(num_waiting)
        if not (batch := [self._waiting.pop() for _ in range(size)]):
            return None
        if self._backlog is not None and num_waiting > size:
            self._backlog.waited(num_waiting - num_beside)
        self._num_batches += 1
        self._num_images += size
        self._num_places += max(size, self.max_batch_size)
        return self._answer(batch)

    def _drop_the_late(self) -> None:
        now = self._clock()
        for entry in self._waiting:
            if entry.expires - self.fastest_s <= now:
                waited = now - entry.arrived
                text = f"the deadline passed, or is too near, after {waited:.3f} s in the queue"
                entry.end(None, DeadlineError(f"{text}; {MORE_TIME}"))

    def _size_for(self, num_waiting: int) -> int:
        """Return the largest size that is filled; all that wait if they fill none."""
        backlog = self._backlog
        if (
            backlog
            and backlog.usual <= self.max_batch_size < num_waiting
            and backlog.is_due(num_waiting - self._num_bulk_beside())
        ):
            return backlog.size
        most = min(num_waiting, self.max_batch_size)
        return max((size for size in self._sizes if size <= most), default=most)

    def _num_bulk_beside(self) -> int:
        """Return how many bulk images wait while interactive ones come; 0 if none came of late."""
        if self._clock() - self._interactive_at >= ALONE_S:
            return 0
        return len(self._waiting) - self._waiting.num_ahead("interactive")

    async def _answer(self, batch: list[Waiting]) -> None:
        started = self._clock()
        try:
            ran = await self._run([entry.image for entry in batch])
            timed = ran if isinstance(ran, TimedRows) else TimedRows(ran, started, self._clock())
            rows, started = timed.rows, timed.started
            if len(rows) != len(batch):
                raise RuntimeError(f"the network gave {len(rows)} rows for {len(batch)} images")
        except Exception as error:
            self._executed(batch, started, self._clock(), error)
            if len(batch) == 1:
                batch[0].end(None, error)
                return
            for entry in batch:
                if not entry.is_over:
                    await self._answer([entry])
            return
        executed = self._executed(batch, started, timed.ended)
        self.fastest_s = min(self.fastest_s or executed.infer_s, executed.infer_s)
        for entry, row in zip(batch, rows, strict=True):
            entry.end(BatchResult(row, started - entry.arrived, executed))

    def _executed(
        self, batch: list[Waiting], started: float, ended: float, error: Exception | None = None
    ) -> ExecutedBatch:
        calls = tuple(entry.call for entry in batch)
        executed = ExecutedBatch(started, ended, calls, error)
        self._on_batch(executed)
        return executed
