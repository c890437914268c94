"""One image's answer from the probabilities of the members, wherever they come from."""

from collections.abc import Mapping, Sequence

from app.messages import Combined
from models.ensemble import Probabilities, entropy, top_k


def combined_row(
    mean: Probabilities,
    members: Mapping[str, Probabilities],
    labels: Sequence[str],
    k: int,
    fingerprint: str,
    *,
    is_row_kept: bool = False,
) -> Combined:
    """Return the answer of ``k`` classes from the average (C,) and each member's row (C,).

    ``is_row_kept``: ``mean`` is no average that others can make again, and goes with the answer.
    """
    own = {name: top_k(row, labels, k) for name, row in members.items()}
    firsts = {predictions[0].index for predictions in own.values()}
    row = mean if is_row_kept else None
    return Combined(top_k(mean, labels, k), own, len(firsts) == 1, entropy(mean), fingerprint, row)
