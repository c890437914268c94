"""The interfaces by which the graph calls its stages, wherever they run.

Objects in this process (:mod:`app.deployments`) and deployments behind a handle
(:mod:`app.calls.remote`) implement these protocols. ``left_s`` is the time that the request has
left, in seconds; calls that would take longer raise :class:`app.errors.DeadlineError`.
"""

from collections.abc import Awaitable, Mapping
from typing import Protocol

import numpy as np

from app.messages import Combined, Decoded, MemberAnswer
from app.queueing.priority import Lane
from models.ensemble import Probabilities
from models.runtime import Pixels


class DecoderStage(Protocol):
    """Decodes image files to pixels."""

    async def decode(self, files: list[bytes], left_s: float, lane: Lane) -> Decoded:
        """Decode every file; a bad file becomes a fault in the answer."""


class MemberStage(Protocol):
    """One network of the ensemble."""

    def classify(self, images: Pixels, left_s: float, lane: Lane) -> Awaitable[MemberAnswer]:
        """Return the probabilities of images, uint8 (K, H, W, 3) BGR.

        Of a member in this process it is a future, which is cheaper than a task.
        """


class CombinerStage(Protocol):
    """Combines the members' probabilities into answers."""

    async def combine(
        self,
        members: Mapping[str, Probabilities],
        top_k: int,
        left_s: float,
        threshold: float | None,
    ) -> list[Combined]:
        """Return an answer per image from float32 (K, C) of each member that answered.

        ``threshold`` is the request's, for a multi-label set; None: the set's own.
        """


class ViewedMember:
    """A member that is asked about several views of each image, and answers their mean.

    The operator's ``preprocess`` makes the views, for example the image and its mirror image: the
    member is asked about the K * V images of uint8 (K, V, H, W, 3).
    """

    def __init__(self, member: MemberStage) -> None:
        self._member = member

    async def classify(self, images: Pixels, left_s: float, lane: Lane) -> MemberAnswer:
        """Return a row per image, the mean of its views' rows."""
        num_images, num_views = images.shape[:2]
        flat = images.reshape(num_images * num_views, *images.shape[2:])
        return folded(await self._member.classify(flat, left_s, lane), num_views)


def folded(answer: MemberAnswer, num_views: int) -> MemberAnswer:
    """Return the answer for K images from that for their K * V views, grouped by image.

    An image's times are those of its last view.
    """
    rows = answer.probabilities
    mean = rows.reshape(-1, num_views, rows.shape[1]).mean(axis=1, dtype=np.float32)  # (K, C)
    done_ms = np.add(answer.queue_ms, answer.infer_ms).reshape(-1, num_views)
    firsts = np.arange(len(done_ms)) * num_views
    last = (firsts + done_ms.argmax(axis=1)).tolist()
    return answer.rows(last)._replace(probabilities=mean)
