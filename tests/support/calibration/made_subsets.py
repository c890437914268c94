"""Members whose answers are drawn, and a comparison of their ensembles."""

from pathlib import Path

import numpy as np

from calibration.datasets import LabelledImage
from calibration.evaluation.inference import AnsweredBatch
from calibration.evaluation.subsets import MemberCost, SubsetsResult, SubsetStudy
from models.manifest import read_manifest
from tests.support.tiny_networks import write_tiny_set

NAMES = ("good", "fair", "poor")
SIGNAL = {"good": 3.0, "fair": 2.0, "poor": 0.5}
COSTS = {"good": MemberCost(8.0, 80.0), "fair": MemberCost(4.0, 20.0), "poor": MemberCost(2.0, 30)}
NUM_CLASSES = 4


class Drawn:
    """Images that are no files, their classes, and what each member says of them."""

    def __init__(self, num_images: int = 400, seed: int = 5) -> None:
        rng = np.random.default_rng(seed)
        self.truth = rng.integers(0, NUM_CLASSES, num_images)
        self.images = [LabelledImage(Path(f"no/{i}.png"), int(t)) for i, t in enumerate(self.truth)]
        self.rows = {}
        for name in NAMES:
            scores = rng.normal(size=(num_images, NUM_CLASSES))
            scores[np.arange(num_images), self.truth] += SIGNAL[name]
            raised = np.exp(scores)
            self.rows[name] = (raised / raised.sum(axis=1, keepdims=True)).astype(np.float32)

    def places(self, images: list[LabelledImage]) -> list[int]:
        return [int(image.path.stem) for image in images]

    def batch(self, images: list[LabelledImage]) -> AnsweredBatch[LabelledImage]:
        chosen = self.places(images)
        rows = {name: self.rows[name][chosen] for name in NAMES}
        return AnsweredBatch(images, [], {"INT8": rows}, [])


def study_of(folder: Path, weights: dict[str, float] | None = None) -> SubsetStudy:
    write_tiny_set(folder, gains=dict.fromkeys(NAMES, 4.0), weights=weights)
    return SubsetStudy(read_manifest(folder), "INT8", COSTS, str(folder))


def compared(
    folder: Path, drawn: Drawn, *, size: int = 7, weights: dict[str, float] | None = None
) -> SubsetsResult:
    """Return what comes of the images in batches of ``size``."""
    study = study_of(folder, weights)
    ordered = study.ordered(drawn.images)
    for start in range(0, len(ordered), size):
        study.add(drawn.batch(ordered[start : start + size]))
    return study.result()
