"""The cascade: the other members are asked only where the first one is not sure.

Off unless ``cascade_margin`` is set. ``tandem evaluate`` says which margin costs how much accuracy.
"""

import asyncio
from collections.abc import Mapping, Sequence

import numpy as np

from app.calls.attempts import OF_RAY, as_tandem
from app.errors import MORE_TIME, DeadlineError, OtherSetError
from app.graph.members import NOT_ASKED, MemberResults, Members, needed_of
from app.graph.request import ClassifyRequest
from app.graph.stages import MemberStage
from app.settings import AnswerPolicy, Settings
from models.ensemble import is_sure
from models.errors import TandemError
from models.image_inputs import ImageInputs
from models.runtime import Pixels


class Cascade:
    """Two or more members, asked one after the others; the manifest's first goes first."""

    def __init__(
        self,
        members: Mapping[str, MemberStage],
        inputs: ImageInputs,
        margin: float,
        fingerprint: str,
        policy: AnswerPolicy = "all",
        patience_s: float = 1.0,
    ) -> None:
        self.margin = margin
        (self._name, first), *others = members.items()
        self._patience_s = patience_s
        self._first = Members({self._name: first}, inputs, fingerprint, "all", patience_s)
        self._breaker = self._first.breakers[self._name]
        self._others = Members(dict(others), inputs, fingerprint, policy, patience_s)
        self._needed = needed_of(policy, len(members))
        self._skipped = tuple(name for name, _ in others)

    async def ask(self, images: Pixels, request: ClassifyRequest) -> list[MemberResults]:
        """Return results of the images that the first member is sure of, and one of the rest.

        Every image is decided by itself.
        """
        if self._can_do_without and not self._breaker.allows():
            return await self._ask_the_others(images, request, NOT_ASKED)
        try:
            first = await self._ask_the_first(images, request)
        except OtherSetError:
            raise
        except (TandemError, *OF_RAY) as error:
            if not self._can_do_without:
                raise
            return await self._ask_the_others(images, request, as_tandem(error).code)
        sure = is_sure(first.answers[self._name].probabilities, self.margin)  # (K,) bool
        results = []
        if sure.any():
            results.append(self._of(first, np.flatnonzero(sure).tolist(), self._skipped))
        if not sure.all():
            unsure = np.flatnonzero(~sure).tolist()
            left = images if len(unsure) == len(images) else images[unsure]
            (rest,) = await self._others.ask(left, request, self._needed - 1)
            own = self._of(first, unsure)
            answers, call_times = own.answers | rest.answers, own.call_times | rest.call_times
            results.append(MemberResults(own.images, answers, call_times, missing=rest.missing))
        return results

    @property
    def _can_do_without(self) -> bool:
        """Whether the policy is content with the others."""
        return self._needed <= len(self._skipped)

    async def _ask_the_first(self, images: Pixels, request: ClassifyRequest) -> MemberResults:
        """Ask the first member; if the others would do, it has half of the time for its answer.

        That may be little: it is at fault only if that was as much as ``patience_s``.
        """
        left_s = request.left_s / 2 if self._can_do_without else None
        try:
            async with asyncio.timeout(left_s):
                (results,) = await self._first.ask(images, request)
        except TimeoutError as error:
            if left_s is not None and left_s >= self._patience_s:
                self._breaker.failed()
            raise DeadlineError(f"{self._name} did not answer in time; {MORE_TIME}") from error
        return results

    async def _ask_the_others(
        self, images: Pixels, request: ClassifyRequest, why: str
    ) -> list[MemberResults]:
        """Ask the others for every image, the first member being missing."""
        (rest,) = await self._others.ask(images, request, self._needed)
        rest.missing[self._name] = why
        return [rest]

    def _of(
        self, results: MemberResults, positions: Sequence[int], skipped: tuple[str, ...] = ()
    ) -> MemberResults:
        """Return the part of the first member's results that has these images."""
        part = results.answers[self._name].rows(positions)
        return MemberResults(tuple(positions), {self._name: part}, results.call_times, skipped)


def cascade_of(
    members: Mapping[str, MemberStage],
    inputs: ImageInputs,
    settings: Settings,
    fingerprint: str,
) -> Cascade | None:
    """Return the cascade that the settings ask for; a single member has nobody to skip."""
    margin = settings.cascade_margin
    if margin is None or len(members) < 2:
        return None
    policy, patience_s = settings.answer_policy, settings.member_patience_s
    return Cascade(members, inputs, margin, fingerprint, policy, patience_s)
