"""The cascade: the other members are asked only where the first one is not sure.

Off unless ``cascade_margin`` is set. ``tandem evaluate`` says which margin costs how much accuracy.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np

from app.calls.stage_errors import OF_RAY, as_tandem
from app.errors import MORE_TIME, DeadlineError, OtherSetError
from app.graph.members import NOT_ASKED, MemberResults, Members
from app.graph.quorum import CircuitBreaker, needed_of
from app.graph.request import ClassifyRequest
from app.messages import MemberAnswer
from app.settings import AnswerPolicy, Settings
from models.ensemble import is_sure
from models.errors import TandemError
from models.runtime import Pixels


class Cascade:
    """Two or more members, asked one after the others; the manifest's first goes first."""

    def __init__(
        self,
        members: Mapping[str, Any],
        margin: float,
        policy: AnswerPolicy = "all",
        patience_s: float = 1.0,
        fingerprint: str = "",
    ) -> None:
        self.margin = margin
        (self._name, first), *others = members.items()
        self._breaker = CircuitBreaker()
        self._first = Members({self._name: first}, "all", patience_s, self._breaker, fingerprint)
        self._others = Members(dict(others), policy, patience_s, self._breaker, fingerprint)
        self._needed = needed_of(policy, len(members))
        self._skipped = tuple(name for name, _ in others)

    async def ask(self, images: Pixels, request: ClassifyRequest) -> list[MemberResults]:
        """Return a group of the images that the first member is sure of, and one of the rest.

        Every image is decided by itself.
        """
        if self._can_do_without and not self._breaker.allows(self._name):
            return await self._ask_the_others(images, request, NOT_ASKED)
        try:
            group = await self._ask_the_first(images, request)
        except OtherSetError:
            raise
        except (TandemError, *OF_RAY) as error:
            if not self._can_do_without:
                raise
            return await self._ask_the_others(images, request, as_tandem(error).code)
        sure = is_sure(group.answers[self._name].probabilities, self.margin)  # (K,) bool
        groups = []
        if sure.any():
            groups.append(self._of(group, np.flatnonzero(sure), self._skipped))
        if not sure.all():
            places = np.flatnonzero(~sure)
            left = images if len(places) == len(images) else images[places]
            (rest,) = await self._others.ask(left, request, self._needed - 1)
            own = self._of(group, places)
            answers, call_times = own.answers | rest.answers, own.call_times | rest.call_times
            groups.append(MemberResults(own.images, answers, call_times, missing=rest.missing))
        return groups

    @property
    def _can_do_without(self) -> bool:
        """Whether the policy is content with the others."""
        return self._needed <= len(self._skipped)

    async def _ask_the_first(self, images: Pixels, request: ClassifyRequest) -> MemberResults:
        """Ask the first member; if the others would do, it has half of the time for its answer."""
        left_s = request.left_s / 2 if self._can_do_without else None
        try:
            async with asyncio.timeout(left_s):
                (group,) = await self._first.ask(images, request)
        except TimeoutError as error:
            self._breaker.failed(self._name)
            raise DeadlineError(f"{self._name} did not answer in time; {MORE_TIME}") from error
        return group

    async def _ask_the_others(
        self, images: Pixels, request: ClassifyRequest, why: str
    ) -> list[MemberResults]:
        """Ask the others for every image, the first member being missing."""
        (rest,) = await self._others.ask(images, request, self._needed)
        rest.missing[self._name] = why
        return [rest]

    def _of(
        self, group: MemberResults, places: Any, skipped: tuple[str, ...] = ()
    ) -> MemberResults:
        """Return the part of the first member's group that has these images."""
        answer = group.answers[self._name]
        images = tuple(int(place) for place in places)
        part = MemberAnswer(
            answer.probabilities[places],
            tuple(answer.queue_ms[i] for i in images),
            tuple(answer.infer_ms[i] for i in images),
            tuple(answer.batch_size[i] for i in images),
            answer.model_set_fingerprint,
        )
        return MemberResults(images, {self._name: part}, group.call_times, skipped)


def cascade_of(
    members: Mapping[str, Any], settings: Settings, fingerprint: str = ""
) -> Cascade | None:
    """Return the cascade that the settings ask for; a single member has nobody to skip."""
    margin = settings.cascade_margin
    if margin is None or len(members) < 2:
        return None
    return Cascade(members, margin, settings.answer_policy, settings.member_patience_s, fingerprint)
