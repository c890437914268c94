"""One image's answer from the rows of the members, wherever they come from."""

from collections.abc import Mapping

from app.messages import Combined
from models.answer_rule import AnswerRule
from models.ensemble import Probabilities


def combined_row(
    mean: Probabilities,
    members: Mapping[str, Probabilities],
    rule: AnswerRule,
    k: int,
    fingerprint: str,
    *,
    is_row_kept: bool = False,
) -> Combined:
    """Return the answer of up to ``k`` classes from the average (C,) and each member's row (C,).

    ``is_row_kept``: ``mean`` is no average that others can make again, and goes with the answer.
    """
    own = {name: rule.predictions(row, k) for name, row in members.items()}
    is_agreed = rule.agree(members.values())
    row = mean if is_row_kept else None
    predictions, unsure = rule.predictions(mean, k), rule.entropy(mean)
    return Combined(predictions, own, is_agreed, unsure, fingerprint, row, rule.threshold)
