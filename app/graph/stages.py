"""The stages of the graph as the graph calls them, wherever they run.

An object in this process (:mod:`app.deployments`) and a deployment behind a handle
(:mod:`app.calls.remote`) both satisfy these protocols. ``left_s`` is the time that the request has
left, in seconds; what cannot be done in it raises :class:`app.errors.DeadlineError`.
"""

import asyncio
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import numpy as np

from app.messages import Combined, Decoded, MemberAnswer
from app.queueing.priority import Lane
from models.ensemble import Probabilities
from models.runtime import Pixels


class DecoderStage(Protocol):
    """Image files to pixels."""

    async def decode(self, files: list[bytes], left_s: float, lane: Lane) -> Decoded:
        """Decode every file; a bad one is a fault in the answer."""


class MemberStage(Protocol):
    """One network of the ensemble."""

    async def classify(self, images: Pixels, left_s: float, lane: Lane) -> MemberAnswer:
        """Return the probabilities of uint8 (K, H, W, 3) BGR."""


@runtime_checkable
class LocalMemberStage(MemberStage, Protocol):
    """A member of this process: a call of it needs no task."""

    def begin(self, images: Pixels, left_s: float, lane: Lane) -> asyncio.Future[MemberAnswer]:
        """Return the future of :meth:`classify`; to cancel it is to leave the queue."""


class CombinerStage(Protocol):
    """The members' probabilities to answers."""

    async def combine(
        self,
        members: Mapping[str, Probabilities],
        top_k: int,
        left_s: float,
        threshold: float | None,
    ) -> list[Combined]:
        """Return one answer per image from float32 (K, C) of every member that answered.

        ``threshold``: what the request asks for in place of a multi-label set's own, if it does.
        """


class ViewedMember:
    """A member that is asked for several views of each image, and answers their mean.

    The views are what the operator's ``preprocess`` makes, such as the image and its mirror image:
    of uint8 (K, V, H, W, 3) the member is asked for K * V images.
    """

    def __init__(self, member: MemberStage) -> None:
        self._member = member

    async def classify(self, images: Pixels, left_s: float, lane: Lane) -> MemberAnswer:
        """Return one row per image, the mean of its views' rows."""
        num_images, num_views = images.shape[:2]
        flat = images.reshape(num_images * num_views, *images.shape[2:])
        return folded(await self._member.classify(flat, left_s, lane), num_views)


def viewed(members: Mapping[str, MemberStage], num_views: int) -> Mapping[str, MemberStage]:
    """Return the members as they are asked for so many views; themselves if it is one."""
    if num_views == 1:
        return members
    return {name: ViewedMember(member) for name, member in members.items()}


def folded(answer: MemberAnswer, num_views: int) -> MemberAnswer:
    """Return the answer for K images from that for their K * V views, an image's side by side.

    An image's times are those of the view that was done last.
    """
    rows = answer.probabilities
    mean = rows.reshape(-1, num_views, rows.shape[1]).mean(axis=1, dtype=np.float32)  # (K, C)
    done_ms = np.add(answer.queue_ms, answer.infer_ms).reshape(-1, num_views)
    firsts = np.arange(len(done_ms)) * num_views
    last = (firsts + done_ms.argmax(axis=1)).tolist()
    return MemberAnswer(
        mean,
        tuple(answer.queue_ms[i] for i in last),
        tuple(answer.infer_ms[i] for i in last),
        tuple(answer.batch_size[i] for i in last),
        answer.model_set_fingerprint,
    )
