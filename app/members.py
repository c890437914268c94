"""The members of the ensemble, asked at the same time."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.request import ClassifyRequest
from app.stages import MemberAnswer, call
from app.timeline import Span
from models.runtime import Pixels


@dataclass(frozen=True, slots=True)
class Group:
    """Images of a request that the same members answered."""

    images: tuple[int, ...]  # their places among the request's good images
    answers: dict[str, MemberAnswer]  # by member, a row per image of ``images``
    hops: dict[str, Span]
    skipped: tuple[str, ...] = ()  # members that were not asked, on purpose


class Members:
    """What the graph has of members: handles, or objects in this process, by name."""

    def __init__(self, members: Mapping[str, Any]) -> None:
        self._members = members

    async def ask(self, images: Pixels, request: ClassifyRequest) -> list[Group]:
        """Send the one tensor to all at once; it was resolved before it is fanned out."""
        left_s = request.left_s

        async def ask(member: Any) -> tuple[MemberAnswer, Span]:
            with request.timeline.measure() as hop:
                answer: MemberAnswer = await call(member, "classify", images, left_s, request.lane)
            return answer, hop

        tasks = {name: asyncio.create_task(ask(m)) for name, m in self._members.items()}
        try:
            await asyncio.gather(*tasks.values())
        finally:  # when one member fails, the others' work is of no use
            for task in tasks.values():
                task.cancel()
        done = {name: task.result() for name, task in tasks.items()}
        answers = {name: answer for name, (answer, _) in done.items()}
        hops = {name: hop for name, (_, hop) in done.items()}
        return [Group(tuple(range(len(images))), answers, hops)]
