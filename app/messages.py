"""The messages that stages of the graph send to each other."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from models.answer_rule import AnswerRule
from models.ensemble import Prediction, Probabilities
from models.errors import TandemError
from models.runtime import Pixels

logger = logging.getLogger("ray.serve")


@dataclass(frozen=True, slots=True)
class Fault:
    """An image's error as a value: one bad file must not fail its neighbours."""

    status: int
    code: str
    message: str

    @classmethod
    def of(cls, error: TandemError) -> "Fault":
        return cls(error.status, error.code, error.message)


# What a client is told when the fault is ours; the exception itself is the log's.
UNEXPECTED = Fault(
    500,
    TandemError.code,
    "an error inside the service; its log has the details under this request id",
)


def logged_fault(error: Exception, request_id: str) -> Fault:
    """Return the fault that a client gets for an error; errors of the service are logged."""
    extra = {"request_id": request_id}
    if not isinstance(error, TandemError):
        logger.error("request %s failed", request_id, exc_info=error, extra=extra)
        return UNEXPECTED
    if error.status == UNEXPECTED.status:
        logger.error("request %s: %s", request_id, error.message, extra=extra)
    return Fault.of(error)


class Decoded(NamedTuple):
    """The Decoder's answer: the good images stacked, in order, and the bad ones' faults."""

    # uint8 BGR, (K, H, W, 3); (K, B) where members take different inputs: models.image_inputs
    images: Pixels
    faults: dict[int, Fault]  # by position in the request
    decode_ms: tuple[float, ...]  # per good image
    model_set_fingerprint: str  # of all stages alike, but in a rolling update


class MemberAnswer(NamedTuple):
    """A Classifier's answer for K images."""

    probabilities: Probabilities  # (K, C) float32
    queue_ms: tuple[float, ...]  # per image
    infer_ms: tuple[float, ...]  # of the batch that the image was in
    batch_size: tuple[int, ...]
    model_set_fingerprint: str

    def rows(self, positions: Sequence[int]) -> "MemberAnswer":
        """Return the answer for some of the images."""
        return MemberAnswer(
            self.probabilities[positions],
            tuple(self.queue_ms[i] for i in positions),
            tuple(self.infer_ms[i] for i in positions),
            tuple(self.batch_size[i] for i in positions),
            self.model_set_fingerprint,
        )


class Combined(NamedTuple):
    """The Combiner's answer for one image; every list is likeliest first."""

    predictions: list[Prediction]
    members: dict[str, list[Prediction]]
    agreement: bool  # all members that answered have the same top-1, or the same labels
    entropy: float  # of the average's row, 0 (sure) to 1; models/answer_rule.py
    model_set_fingerprint: str
    row: Probabilities | None = None  # (C,), of the operator's own combine: no average to redo
    threshold: float | None = None  # of the scores that are listed, of a multi-label set
    sure: bool | None = None  # by the set's bound; None: it has none, or some members are missing

    @classmethod
    def of(
        cls,
        mean: Probabilities,
        members: Mapping[str, Probabilities],
        rule: AnswerRule,
        k: int,
        fingerprint: str,
        *,
        is_row_kept: bool = False,
        is_whole: bool = True,
    ) -> "Combined":
        """Return the answer of up to ``k`` classes from the average and each member's row, (C,).

        ``is_row_kept``: ``mean`` is no average that others can make again, and goes with the
        answer. ``is_whole``: it is of all members.
        """
        own = {name: rule.predictions(row, k) for name, row in members.items()}
        is_agreed = rule.agree(members.values())
        row = mean if is_row_kept else None
        predictions, unsure = rule.predictions(mean, k), rule.entropy(mean)
        # The bound was measured on the average of all members.
        sure = rule.is_sure(mean) if is_whole and not is_row_kept else None
        return cls(predictions, own, is_agreed, unsure, fingerprint, row, rule.threshold, sure)
