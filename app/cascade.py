"""The cascade: the first member answers alone where it is sure; the others see the rest.

Off unless ``cascade_margin`` is set. ``tandem evaluate`` says which margin costs how much accuracy.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from app.members import Group, Members
from app.request import ClassifyRequest
from app.stages import MemberAnswer
from models.ensemble import is_sure
from models.runtime import Pixels


class Cascade:
    """Two or more members, asked one after the others; the manifest's first goes first."""

    def __init__(self, members: Mapping[str, Any], margin: float) -> None:
        self.margin = margin
        (self._name, first), *others = members.items()
        self._first, self._others = Members({self._name: first}), Members(dict(others))
        self._skipped = tuple(name for name, _ in others)

    async def ask(self, images: Pixels, request: ClassifyRequest) -> list[Group]:
        """Return a group of the images that the first member is sure of, and one of the rest.

        Every image is decided by itself.
        """
        (group,) = await self._first.ask(images, request)
        sure = is_sure(group.answers[self._name].probabilities, self.margin)  # (K,) bool
        groups = []
        if sure.any():
            groups.append(self._of(group, np.flatnonzero(sure), self._skipped))
        if not sure.all():
            places = np.flatnonzero(~sure)
            left = images if len(places) == len(images) else images[places]
            (rest,) = await self._others.ask(left, request)
            own = self._of(group, places)
            answers, hops = own.answers | rest.answers, own.hops | rest.hops
            groups.append(Group(own.images, answers, hops))
        return groups

    def _of(self, group: Group, places: Any, skipped: tuple[str, ...] = ()) -> Group:
        """Return the part of the first member's group that has these images."""
        answer = group.answers[self._name]
        images = tuple(int(place) for place in places)
        part = MemberAnswer(
            answer.probabilities[places],
            tuple(answer.queue_ms[i] for i in images),
            tuple(answer.infer_ms[i] for i in images),
            tuple(answer.batch_size[i] for i in images),
        )
        return Group(images, {self._name: part}, group.hops, skipped)


def cascade_of(members: Mapping[str, Any], margin: float | None) -> Cascade | None:
    """Return the cascade that the settings ask for; a single member has nobody to skip."""
    return None if margin is None or len(members) < 2 else Cascade(members, margin)
