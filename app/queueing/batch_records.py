"""Records of the batch queue: an image's result, an executed batch, the queue's state."""

import asyncio
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


@dataclass(slots=True)
class Waiting:
    """An image in the queue; times are by the queue's clock."""

    image: Pixels  # (H, W, 3)
    future: asyncio.Future[BatchResult]
    arrived: float
    expires: float
    call: int  # the caller's number for the images that it submitted together

    def is_gone(self) -> bool:
        """Whether the caller went away, or was answered."""
        return self.future.done()
