"""Compares ensembles on a stream of batches: the first half fits weights, the second judges.

It keeps a byte per ensemble for each judging image, and the rows of fitting images up to a limit.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from calibration.datasets import LabelledImage, truth_of
from calibration.evaluation.cascade import CascadeTally
from calibration.evaluation.inference import AnsweredBatch
from calibration.evaluation.subsets.candidates import FitData, candidates_of, subsets_of
from calibration.evaluation.subsets.costs import MemberCost
from calibration.evaluation.subsets.judging import Judge
from calibration.evaluation.subsets.scores import SubsetsResult
from calibration.evaluation.subsets.split import split
from models.ensemble import Probabilities
from models.errors import ModelSetError
from models.manifest import Manifest
from models.record import Precision

# float32 of whole rows, 32 MiB: 1,000 images of 8 members with 1,000 classes. Their 247 fits take
# minutes, and a coefficient per member needs no more images.
MAX_KEPT_VALUES = 8 * 2**20


class SubsetStudy:
    """Every subset of a set's members, averaged and with fitted weights of the logarithms.

    Args:
        manifest: the set's; all members must have ``precision``.
        precision: of the compared networks.
        costs: of each member.
        served_as: the set's name in the service's settings.

    """

    def __init__(
        self,
        manifest: Manifest,
        precision: Precision,
        costs: dict[str, MemberCost],
        served_as: str,
    ) -> None:
        self._weights = manifest.weights
        subsets_of(list(self._weights))  # raises if there are too many
        self._precision, self._costs, self._served_as = precision, costs, served_as
        self._to_fit: frozenset[LabelledImage] = frozenset()
        self._rows: list[Probabilities] = []  # (M, n, C) each
        self._truth: list[npt.NDArray[np.int64]] = []
        self._num_values = 0
        self._num_fitted = 0
        self._judge: Judge | None = None

    def ordered(self, images: Sequence[LabelledImage]) -> list[LabelledImage]:
        """Return the images in the order in which :meth:`add` must get them.

        Raises:
            ModelSetError: there are too few for two halves.

        """
        to_fit, to_judge = split(images)
        if not to_fit or not to_judge:
            raise ModelSetError(
                f"--subsets fits weights on one half of the images and judges on the other: "
                f"{len(images)} are too few; give more"
            )
        self._to_fit = frozenset(to_fit)
        return to_fit + to_judge

    def add(self, batch: AnsweredBatch[LabelledImage]) -> None:
        """Add a batch: for fitting, or for judging after the last one for fitting."""
        rows = batch.probabilities.get(self._precision)
        if not rows:
            return
        stacked = np.stack([rows[name] for name in self._weights])  # (M, n, C)
        truth = truth_of(batch.images)
        is_fitted = np.array([image in self._to_fit for image in batch.images])
        if is_fitted.any():
            self._keep(stacked[:, is_fitted], truth[is_fitted])
        if not is_fitted.all() and self._num_fitted:
            if self._judge is None:
                self._judge = self._fitted()
            self._judge.add(stacked[:, ~is_fitted], truth[~is_fitted])

    def result(self) -> SubsetsResult:
        """Return the comparison.

        Raises:
            ModelSetError: no image of a half could be read.

        """
        if self._judge is None:
            raise ModelSetError(
                "--subsets fits weights on one half of the images and judges on the other: of "
                "one of them none can be read; give more images"
            )
        return self._judge.result(self._precision, self._num_fitted, self._costs, self._served_as)

    def _keep(self, rows: Probabilities, truth: npt.NDArray[np.int64]) -> None:
        if not self._rows or self._num_values + rows.size <= MAX_KEPT_VALUES:
            self._rows.append(rows)
            self._truth.append(truth)
            self._num_values += rows.size
            self._num_fitted += len(truth)

    def _fitted(self) -> Judge:
        """Fit every candidate's weights, and drop the rows kept for that."""
        rows, truth = np.concatenate(self._rows, axis=1), np.concatenate(self._truth)
        candidates = candidates_of(self._weights, FitData(rows, truth))
        self._rows, self._truth = [], []
        return Judge(candidates, self._weights, CascadeTally(list(self._weights)))
