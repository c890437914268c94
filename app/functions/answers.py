"""Checks the results of the operator's own functions, in the trial and for every request."""

import numpy as np

from app.functions.signatures import MAX_VIEWS
from models.ensemble import Probabilities
from models.runtime import Pixels

SUM_TOLERANCE = 1e-3  # of a row's sum; the float32 sum of 1,000 classes is off by a hundredth of it

# A class that eight members score 0.99 keeps a higher product than this.
SURELY_THERE = 0.6


class WrongAnswerError(ValueError):
    """A function's result does not fit its signature; the message says why."""


def as_pixels(
    answer: object, shape: tuple[int, ...], num_views: int | None = None
) -> tuple[Pixels, int]:
    """Check the result of ``preprocess``; return it with its number of views per image.

    Args:
        answer: the function's result.
        shape: of the function's argument, (N, H, W, 3).
        num_views: the required number; None: any number from 1 to ``MAX_VIEWS``.

    Returns:
        uint8 (V * N, H, W, 3), contiguous, and V.

    """
    num_images, *rest = shape
    views = f"{num_views} * {num_images}" if num_views else f"V * {num_images}"
    wanted = f"uint8 ({views}, {', '.join(map(str, rest))})"
    if not isinstance(answer, np.ndarray) or answer.dtype != np.uint8:
        raise WrongAnswerError(f"{_described(answer)}, not {wanted}")
    per_image, left = divmod(len(answer), num_images) if answer.ndim == len(shape) else (0, 0)
    fits = per_image and not left and list(answer.shape[1:]) == rest
    if not fits or (num_views is not None and per_image != num_views):
        raise WrongAnswerError(f"{_described(answer)}, not {wanted}")
    if per_image > MAX_VIEWS:
        raise WrongAnswerError(f"{per_image} views of each image; the limit is {MAX_VIEWS}")
    return np.ascontiguousarray(answer), per_image


def as_rows(
    answer: object, shape: tuple[int, int], *, is_multi_label: bool = False
) -> Probabilities:
    """Check the result of ``combine``: float32 (N, C) of ``shape``, each row a distribution.

    In a multi-label set each value is an independent score, 0 to 1.
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
    """Check the result of ``combine`` for scores that were all 0.99 or more, in the trial.

    Raises:
        WrongAnswerError: a class has a low score, as if the classes excluded each other.

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
