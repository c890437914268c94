"""The stages of the graph as the graph calls them, wherever they run.

An object in this process (:mod:`app.deployments`) and a deployment behind a handle
(:mod:`app.calls.remote`) both satisfy these protocols. ``left_s`` is the time that the request has
left, in seconds; what cannot be done in it raises :class:`app.errors.DeadlineError`.
"""

import asyncio
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

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
