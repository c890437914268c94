"""The cascade: asks the other members only about images on which the first is not sure.

It is off unless ``cascade_margin`` is set. ``tandem evaluate`` measures each margin's accuracy.
"""

import asyncio
from collections.abc import Sequence

import numpy as np

from app.calls.attempts import CALL_ERRORS, as_tandem
from app.errors import MORE_TIME, DeadlineError, OtherSetError
from app.graph.members import NOT_ASKED, MemberResults, Members
from app.graph.request import ClassifyRequest
from app.queueing.priority import SHADOW
from models.ensemble import is_sure
from models.errors import TandemError
from models.runtime import Pixels


class Cascade:
    """Asks the first of the members, then the others about the images that need them."""

    def __init__(self, members: Members, margin: float) -> None:
        self.margin, self._members = margin, members
        self._first, *others = members.names
        self._others = tuple(others)
        self._breaker = members.breakers[self._first]

    async def ask(self, images: Pixels, request: ClassifyRequest) -> list[MemberResults]:
        """Return the results of images that the first member is sure of, and of the other images.

        Each image is decided separately.
        """
        if self._can_do_without(request) and not self._breaker.allows():
            return await self._ask_the_others(images, request, NOT_ASKED)
        try:
            first = await self._ask_the_first(images, request)
        except OtherSetError:
            raise
        except (TandemError, *CALL_ERRORS) as error:
            if not self._can_do_without(request):
                raise
            return await self._ask_the_others(images, request, as_tandem(error).code)
        sure = is_sure(first.answers[self._first].probabilities, self.margin)  # (K,) bool
        results = []
        if sure.any():
            results.append(self._of(first, np.flatnonzero(sure).tolist(), self._others))
        if not sure.all():
            unsure = np.flatnonzero(~sure).tolist()
            left = images if len(unsure) == len(images) else images[unsure]
            (rest,) = await self._members.ask(left, request, self._others, self._members.needed - 1)
            own = self._of(first, unsure)
            answers, call_times = own.answers | rest.answers, own.call_times | rest.call_times
            results.append(MemberResults(own.images, answers, call_times, missing=rest.missing))
        return results

    def _can_do_without(self, request: ClassifyRequest) -> bool:
        """Whether the answer policy admits an answer without the first member; no copy does."""
        return self._members.needed <= len(self._others) and request.lane != SHADOW

    async def _ask_the_first(self, images: Pixels, request: ClassifyRequest) -> MemberResults:
        """Ask the first member; it has half of the time if the others could answer without it.

        A timeout counts as its failure only if half of the time is at least ``patience_s``.
        """
        left_s = request.left_s / 2 if self._can_do_without(request) else None
        try:
            async with asyncio.timeout(left_s):
                (results,) = await self._members.ask(images, request, (self._first,), 1)
        except TimeoutError as error:
            if left_s is not None and left_s >= self._members.patience_s:
                self._breaker.failed()
            raise DeadlineError(f"{self._first} did not answer in time; {MORE_TIME}") from error
        return results

    async def _ask_the_others(
        self, images: Pixels, request: ClassifyRequest, why: str
    ) -> list[MemberResults]:
        """Ask the others about every image, since the first member did not answer."""
        (rest,) = await self._members.ask(images, request, self._others, self._members.needed)
        rest.missing[self._first] = why
        return [rest]

    def _of(
        self, results: MemberResults, positions: Sequence[int], skipped: tuple[str, ...] = ()
    ) -> MemberResults:
        """Return the first member's results for some of the images."""
        part = results.answers[self._first].rows(positions)
        return MemberResults(tuple(positions), {self._first: part}, results.call_times, skipped)
