"""Records of the batch queue: an image's result, an executed batch, the queue's state."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from models.ensemble import Probabilities
from models.runtime import Pixels


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ExecutedBatch:
    """A batch that has been run; each is its own object, to be told apart by identity."""

    started: float  # by the queue's clock, as ``ended``
    ended: float
    calls: tuple["QueueCall", ...]  # of each image: that ``submit`` was given
    error: Exception | None = None

    @property
    def size(self) -> int:
        return len(self.calls)

    @property
    def infer_s(self) -> float:
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


class QueueCall(Protocol):
    """Whose images wait together."""

    def image_ended(self, entry: "Waiting") -> None:
        """Hear of an image that has a result or an error; called on the loop, at once.

        Others of its batch may still be to be told.
        """


class Waiting:
    """An image (H, W, 3) in the queue, from ``arrived`` to ``expires`` by the queue's clock.

    ``call`` hears of its end, once, unless it has left.
    """

    __slots__ = ("arrived", "call", "error", "expires", "image", "is_over", "result")

    def __init__(self, image: Pixels, call: QueueCall, arrived: float, expires: float) -> None:
        self.image, self.call, self.arrived, self.expires = image, call, arrived, expires
        self.is_over = False  # it was answered, has failed, or its caller went away
        self.result: BatchResult | None = None
        self.error: BaseException | None = None

    def is_gone(self) -> bool:
        """Whether the caller went away, or was answered."""
        return self.is_over

    def leave(self) -> None:
        """Say that nobody wants the image any more: it is dropped in its turn."""
        self.is_over = True

    def end(self, result: BatchResult | None, error: BaseException | None = None) -> None:
        """Tell the call of the result or the error, unless the image is over."""
        if not self.is_over:
            self.is_over, self.result, self.error = True, result, error
            self.call.image_ended(self)
