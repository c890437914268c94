"""Records of the batch queue: an image's result, an executed batch, the queue's state."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from models.ensemble import Probabilities
from models.runtime import Pixels


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ExecutedBatch:
    """A batch that has been run; each is its own object, to be told apart by identity."""

    started: float  # by the queue's clock, as ``ended``
    ended: float
    calls: tuple[int, ...]  # of each image: the number that ``submit`` was given
    error: Exception | None = None

    @property
    def size(self) -> int:
        """How many images were in it."""
        return len(self.calls)

    @property
    def infer_s(self) -> float:
        """How long it ran."""
        return self.ended - self.started


class TimedRows(NamedTuple):
    """What a batch gave, and when it ran: it may have waited for a thread, and the loop for it."""

    rows: Probabilities  # (N, C)
    started: float  # by the queue's clock, as ``ended``
    ended: float


class BatchResult(NamedTuple):
    """One image's part of a batch."""

    probabilities: Probabilities  # (C,)
    queued_s: float  # from submission to the start of its batch
    batch: ExecutedBatch


class QueueReport(NamedTuple):
    """How a queue fares; counts are since it was made."""

    num_waiting: int
    oldest_age_s: float  # of the image that waits longest
    num_batches: int
    num_images: int
    mean_fill: float  # images over places of the largest batch; 0 before the first batch


class Waiting:
    """An image in the queue, and who hears of its end; times are by the queue's clock.

    Args:
        image: (H, W, 3).
        done: called once, when it has a result or an error; not if its caller goes away.
        arrived: when it was queued.
        expires: until when it is to have its turn.
        call: the caller's number for the images that it submitted together.

    """

    __slots__ = ("_done", "arrived", "call", "error", "expires", "image", "is_over", "result")

    def __init__(
        self,
        image: Pixels,
        done: "Callable[[Waiting], None]",
        arrived: float,
        expires: float,
        call: int,
    ) -> None:
        self.image, self.arrived, self.expires, self.call = image, arrived, expires, call
        self._done: Callable[[Waiting], None] | None = done
        self.is_over = False  # it was answered, has failed, or its caller went away
        self.result: BatchResult | None = None
        self.error: BaseException | None = None

    def is_gone(self) -> bool:
        """Whether the caller went away, or was answered."""
        return self.is_over

    def end(self, result: BatchResult | None, error: BaseException | None = None) -> None:
        """Tell the caller, who is told once; without a result or an error it went away."""
        done, self._done = self._done, None
        self.is_over, self.result, self.error = True, result, error
        if done is not None and not (result is None and error is None):
            done(self)
