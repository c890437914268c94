"""Checks what the operator's own functions return, in the trial and for every request."""

import numpy as np

from app.functions.signatures import MAX_VIEWS
from models.ensemble import Probabilities
from models.runtime import Pixels

SUM_TOLERANCE = 1e-3  # of a row's sum; float32 of 1,000 classes is off by a hundredth of it

# Of a class that all members score 0.99: what a product of eight of them still is, well above.
SURELY_THERE = 0.6


class WrongAnswerError(ValueError):
    """A function returned something else than its signature says; the message says what."""


def as_pixels(
    answer: object, given: tuple[int, ...], num_views: int | None = None
) -> tuple[Pixels, int]:
    """Return what ``preprocess`` answered, and how many views of each image that is.

    Args:
        answer: what it returned.
        given: the shape of what it was given, (N, H, W, 3).
        num_views: that it must be; None: any number from 1 to ``MAX_VIEWS``.

    Returns:
        uint8 (V * N, H, W, 3), contiguous, and V.

    """
    num_images, *rest = given
    views = f"{num_views} * {num_images}" if num_views else f"V * {num_images}"
    wanted = f"uint8 ({views}, {', '.join(map(str, rest))})"
    if not isinstance(answer, np.ndarray) or answer.dtype != np.uint8:
        raise WrongAnswerError(f"{_described(answer)}, not {wanted}")
    found = len(answer) // num_images if answer.ndim == len(given) else 0
    fits = found * num_images == len(answer) and list(answer.shape[1:]) == rest if found else False
    if not fits or (num_views is not None and found != num_views):
        raise WrongAnswerError(f"{_described(answer)}, not {wanted}")
    if found > MAX_VIEWS:
        raise WrongAnswerError(f"{found} views of each image; the limit is {MAX_VIEWS}")
    return np.ascontiguousarray(answer), found


def as_rows(
    answer: object, shape: tuple[int, int], *, is_multi_label: bool = False
) -> Probabilities:
    """Return what ``combine`` answered: float32 (N, C) of ``shape``, each row a distribution.

    Of a multi-label set each value is a score, 0 to 1, by itself.
    """
    wanted = f"float32 {shape}"
    if not isinstance(answer, np.ndarray) or (answer.dtype, answer.shape) != (np.float32, shape):
        raise WrongAnswerError(f"{_described(answer)}, not {wanted}")
    rows: Probabilities = np.ascontiguousarray(answer)
    if not np.isfinite(rows).all():
        raise WrongAnswerError("NaN or infinity among the probabilities")
    low, high = float(rows.min()), float(rows.max())
    if low < 0 or high > 1 + SUM_TOLERANCE:
        raise WrongAnswerError(f"probabilities from {low:g} to {high:g}, not from 0 to 1")
    if is_multi_label:
        return rows
    off = np.abs(rows.sum(axis=1, dtype=np.float64) - 1)
    if off.max() > SUM_TOLERANCE:
        total = float(rows[int(off.argmax())].sum())
        raise WrongAnswerError(f"a row that sums to {total:g}, not to 1")
    return rows


def check_scores(rows: Probabilities) -> None:
    """Check what ``combine`` answered of scores that were all 0.99 or more, in the trial.

    Raises:
        WrongAnswerError: a class came out low, as of classes that exclude each other.

    """
    if (low := float(rows.min())) < SURELY_THERE:
        raise WrongAnswerError(
            f"{low:.3g} for a class that every member scores 0.99 or more: this set is "
            "multi-label, and a function that shares one among the classes, or picks one, is none "
            "for it"
        )


def _described(answer: object) -> str:
    if isinstance(answer, np.ndarray):
        return f"{answer.dtype} {answer.shape}"
    return "None" if answer is None else f"a {type(answer).__name__}"
