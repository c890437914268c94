"""The Combiner: members' rows to one readable answer per image."""

import math
from collections.abc import Mapping

from app.errors import UPDATING, OtherSetError
from app.functions.loading import fingerprint_with
from app.functions.stages import OwnCombine
from app.messages import Combined
from app.settings import Settings
from models.answer_rule import AnswerRule
from models.ensemble import Probabilities, average
from models.model_set import ModelSet


class Combiner:
    """Averages with the manifest's weights, or has ``combine`` do it, and names the classes."""

    def __init__(self, settings: Settings, model_set: ModelSet | None = None) -> None:
        """Take weights and labels; ``model_set`` is the settings', if already loaded.

        Raises:
            ConfigError: the operator's function, if there is one, is not to be had or fails.

        """
        model_set = model_set or settings.load_set()
        self._own = OwnCombine.of(settings, model_set.manifest)
        function = self._own.calls.function if self._own else None
        self._fingerprint = fingerprint_with(model_set.fingerprint(settings.precision), function)
        self._rule = model_set.answer_rule
        self._weights = {member.name: member.weight for member in model_set.manifest.members}
        self._temperature = model_set.manifest.temperature

    async def combine(
        self,
        members: Mapping[str, Probabilities],
        top_k: int,
        left_s: float = math.inf,
        threshold: float | None = None,
    ) -> list[Combined]:
        """Return one answer per image from float32 (K, C) of every member that answered.

        ``top_k`` classes each; ``left_s`` is of no matter to arithmetic that takes microseconds;
        ``threshold``: of a multi-label set's scores, in place of the manifest's.

        Raises:
            FunctionError: the operator's function raised, or returned no rows.
            OtherSetError: the members are of another model set.

        """
        if not members.keys() <= self._weights.keys():
            names = ", ".join(sorted(members))
            raise OtherSetError(f"no such members here: {names}; {UPDATING}")
        own = self._own
        mean = (
            await own.rows(members) if own else average(members, self._weights, self._temperature)
        )
        rule = self._rule.asked(threshold)
        return [self._one(i, row, members, rule, top_k) for i, row in enumerate(mean)]

    def _one(
        self,
        index: int,
        row: Probabilities,
        members: Mapping[str, Probabilities],
        rule: AnswerRule,
        k: int,
    ) -> Combined:
        own = {name: rows[index] for name, rows in members.items()}
        is_row_kept = self._own is not None
        return Combined.of(row, own, rule, k, self._fingerprint, is_row_kept=is_row_kept)

    async def check_health(self) -> None:
        """Raise :class:`UnhealthyError` if a call of the operator's function does not end."""
        if self._own is not None:
            self._own.calls.check_health()
