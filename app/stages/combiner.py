"""The Combiner: turns the members' probabilities into one answer per image."""

import math
from collections.abc import Mapping

from app.answers import Combined
from app.errors import UPDATING, OtherSetError
from app.queueing.admission import Usage
from app.settings import Settings
from app.stages.own_functions import OwnCombine, fingerprint_with
from models.ensemble import Probabilities, average
from models.ledger import COMBINE_CPU_MS
from models.model_set import ModelSet


class Combiner:
    """Averages the members' rows, or calls the operator's ``combine``, and labels the classes."""

    def __init__(self, settings: Settings, model_set: ModelSet | None = None) -> None:
        """Take weights and labels from ``model_set``, by default the settings'.

        Raises:
            ConfigError: the operator's function cannot be imported, or fails a test call.
        """
        model_set = model_set or settings.load_set()
        self._own = OwnCombine.of(settings, model_set.manifest)
        function = self._own.calls.function if self._own else None
        self._fingerprint = fingerprint_with(
            model_set.fingerprint(settings.served_precision), function
        )
        self._rule = model_set.answer_rule
        self.usage = Usage(1, COMBINE_CPU_MS)
        self._weights = model_set.manifest.weights
        self._trust = model_set.trust

    async def combine(
        self,
        members: Mapping[str, Probabilities],
        top_k: int,
        left_s: float = math.inf,
        threshold: float | None = None,
        step: int | None = None,
        *,
        has_set: bool = False,
    ) -> list[Combined]:
        """Return an answer per image from float32 (K, C) of each member that answered.

        See :class:`app.graph.members.CombinerStage`. The time left is ignored, since this takes
        microseconds.

        Raises:
            FunctionError: the operator's function raised, or did not return rows.
            OtherSetError: the members are of another model set.
        """
        if not members.keys() <= self._weights.keys():
            names = ", ".join(sorted(members))
            raise OtherSetError(f"no such members here: {names}; {UPDATING}")
        trust = self._trust.of(members, step)
        own, num_images = self._own, max(map(len, members.values()), default=0)
        self.usage.began(num_images)
        is_done = False
        try:
            if own is None:
                mean = average(members, self._weights, trust.temperature)
            else:
                mean = await own.rows(members)
            is_done = True
        finally:
            self.usage.ended(num_images, done=is_done)
        rule, fingerprint = self._rule.asked(threshold), self._fingerprint
        kinds = {"is_row_kept": own is not None, "has_set": has_set}
        answers = []
        for index, row in enumerate(mean):
            rows = {name: own_rows[index] for name, own_rows in members.items()}
            answers.append(Combined.of(row, rows, rule, top_k, fingerprint, trust, **kinds))
        return answers

    async def check_health(self) -> None:
        """Raise :class:`UnhealthyError` if a call of the operator's function hangs."""
        if self._own is not None:
            self._own.calls.check_health()
