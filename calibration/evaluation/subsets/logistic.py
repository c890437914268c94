"""Fits a logarithmic opinion pool: log p(class) = sum of w_m log p_m(class), minus a constant.

It is multinomial logistic regression on the members' log-probabilities, with a coefficient per
member (Hinton 2002, products of experts; Heskes 1998). Its log-likelihood is concave in the
weights. They need not sum to one: their sum makes the pool more or less confident than its members.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize
from scipy.special import logsumexp

FLOOR = np.float32(1e-7)  # of a probability, since quantised networks return zeros
MAX_WEIGHT = 20.0

Weights = npt.NDArray[np.float64]


def log_rows(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return the logarithms of probabilities, with zeros replaced by a lower bound."""
    logs: npt.NDArray[np.float32] = np.log(np.maximum(rows, FLOOR))
    return logs


def fit_logistic(rows: npt.NDArray[np.float32], truth: npt.NDArray[np.int64]) -> Weights:
    """Return the weights (M,), 0 to ``MAX_WEIGHT``, that maximise the likelihood of the truth.

    Args:
        rows: (M, N, C) probabilities.
        truth: (N,) class indices.

    """
    logs = log_rows(rows)
    num_members, num_images, _ = logs.shape
    of_truth = logs[:, np.arange(num_images), truth].astype(np.float64)  # (M, N)

    def loss(weights: Weights) -> tuple[float, Weights]:
        scores = np.tensordot(weights.astype(np.float32), logs, 1)  # (N, C)
        total = logsumexp(scores, axis=1, keepdims=True)
        share = np.exp(scores - total)  # the pool's probabilities
        expected = np.einsum("mnc,nc->mn", logs, share, dtype=np.float64)
        value = float(np.mean(total[:, 0] - weights @ of_truth))
        return value, (expected - of_truth).mean(axis=1)

    start = np.full(num_members, 1 / num_members)
    bounds = [(0.0, MAX_WEIGHT)] * num_members
    minimum: Any = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds)
    weights: Weights = np.asarray(minimum.x, np.float64)
    # Weights that are all zero would ignore the members.
    return weights if weights.sum() > 0 else start
