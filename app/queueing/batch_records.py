"""Records of the batch queue: an image's result, an executed batch, the queue's state."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from models.ensemble import Probabilities
from models.runtime import Pixels


class ExecutedBatch:
    """A batch that has been run; compared by identity. Times are by the queue's clock."""

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


class TimedRows(NamedTuple):
    """The result of a batch with the times at which a thread ran it, without waiting."""

    rows: Probabilities  # (N, C)
    started: float  # both times are by the queue's clock
    ended: float


class BatchResult(NamedTuple):
    """One image's part of a batch."""

    probabilities: Probabilities  # (C,)
    queued_s: float  # from submission to the start of its batch
    batch: ExecutedBatch


class QueueReport(NamedTuple):
    """The state of a queue, for metrics."""

    num_waiting: int
    oldest_age_s: float  # how long the oldest image has waited


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
