"""Compares a running service's lists of labels with those of the same networks here."""

from pathlib import Path
from typing import Any

import numpy as np

from calibration.evaluation.live import MAX_DIFFERENCE, TIE, LiveService
from models.accuracy import ENSEMBLE
from models.answer_rule import above
from models.ensemble import Probabilities
from models.errors import ModelSetError
from models.model_set import ModelSet


class MultiLabelLiveService(LiveService):
    """A running service with a multi-label set.

    In its result ``num_right`` counts images with exactly the right labels.
    """

    may_be_empty = True

    def __init__(self, url: str, model_set: ModelSet, key_file: Path | None = None) -> None:
        super().__init__(url, model_set, key_file)
        self._top_k = model_set.manifest.num_classes  # so that every label is listed
        threshold = model_set.manifest.threshold
        assert threshold is not None  # the set is multi-label
        self._threshold = threshold

    def check_served(self, answer: dict[str, Any], model_set: ModelSet) -> None:
        """Raise unless the service lists labels from the set's threshold on."""
        super().check_served(answer, model_set)
        there, here = answer.get("threshold"), model_set.manifest.threshold
        if there != here:
            raise ModelSetError(
                f"{self.result.url} serves {model_set.name} with a threshold of {there}, here it "
                f"is {here}: serve this set, or evaluate that one"
            )

    def problems_of(
        self, image: Any, body: dict[str, Any], rows: dict[str, Probabilities]
    ) -> list[str]:
        """Count the right classifiers; return an answer's differences from the networks'."""
        result = self.result
        live = {name: member["predictions"] for name, member in body["members"].items()}
        live[ENSEMBLE] = body["predictions"]
        problems = []
        for name, row in rows.items():
            if name not in live:  # left out by the service's answer_policy
                problems.append(f"{name} did not answer")
                continue
            listed = {
                prediction["index"]: float(prediction["probability"]) for prediction in live[name]
            }
            is_right = listed.keys() == set(image.classes)
            result.num_right[name] = result.num_right.get(name, 0) + is_right
            if problem := self._other(listed, row):
                problems.append(f"{name}: {problem}")
        return problems

    def _other(self, listed: dict[int, float], row: Probabilities) -> str | None:
        """Compare the listed scores with the row (C,) of this process."""
        here = set(np.flatnonzero(above(row, self._threshold)).tolist())
        for index in sorted(here ^ listed.keys()):
            if not index < len(row) or abs(float(row[index]) - self._threshold) > TIE:
                where = "in process alone" if index in here else "live alone"
                return f"label {index} is listed {where}"
        for index, score in listed.items():
            off = abs(score - float(row[index]))
            self.result.max_difference = max(self.result.max_difference, off)
            if not off <= MAX_DIFFERENCE:
                return f"score {score:.4f} of label {index} live, {float(row[index]):.4f} here"
        return None
