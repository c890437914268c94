"""Records of the batch queue: an image's result, an executed batch, the queue's state."""

import asyncio
from dataclasses import dataclass
from typing import Any, NamedTuple

from models.ensemble import Probabilities
from models.runtime import Pixels


class BatchResult(NamedTuple):
    """One image's part of a batch."""

    probabilities: Probabilities  # (C,)
    queued_s: float  # from submission to the start of its batch
    infer_s: float  # the batch's own run
    batch_size: int
    started: float  # of the batch's run, by the queue's clock
    batch_span: Any  # what ``on_batch`` returned


class ExecutedBatch(NamedTuple):
    """A batch that has been run, for who keeps a record of it."""

    started: float  # by the queue's clock
    ended: float
    tags: tuple[Any, ...]  # of its images, as they were submitted
    error: Exception | None


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
    tag: Any

    def is_gone(self) -> bool:
        """Whether the caller went away, or was answered."""
        return self.future.done()
