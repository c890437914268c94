"""Classifies a folder in a pipeline of your own with Ray Data, without a service.

    pip install '.[ray-data]'
    python examples/ray_data.py photos --out answers
    RAY_ADDRESS=auto python examples/ray_data.py s3://in/photos --out s3://out/answers --nodes 4

The answers are Parquet files. Ray's nodes must see the folders under the same names. Without a
stage of your own, ``tandem classify-offline --address`` does this, and goes on after a stop.
"""

import argparse
from typing import Any

import numpy as np
import ray
import tandem

CORES = 1  # that Ray counts for a process, which uses all of its node; others read files


class Classifier:
    """Loads the ensemble once in a process, then classifies its batches."""

    def __init__(self, model_set: str) -> None:
        self.ensemble = tandem.load(model_set)

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        """Take the columns path and bytes, (N,) each; return path, label and probability."""
        answers = self.ensemble.classify_many(list(batch["bytes"]))
        first = [getattr(answer, "predictions", [None])[0] for answer in answers]  # None: an error
        return {
            "path": batch["path"],
            "label": [prediction and prediction.label for prediction in first],
            "probability": [prediction and prediction.probability for prediction in first],
        }


def classified(folder: str, model_set: str, nodes: int) -> "ray.data.Dataset":
    """Return the answers, which are computed when they are read or written."""
    return ray.data.read_binary_files(folder, include_paths=True).map_batches(
        Classifier,
        fn_constructor_args=[model_set],
        batch_size=64,
        num_cpus=CORES,
        concurrency=nodes,
        scheduling_strategy="SPREAD",
    )


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("folder")
    arguments.add_argument("--out", default="answers")
    arguments.add_argument("--model-set", default="imagenette")
    arguments.add_argument("--nodes", type=int, default=1)
    options = arguments.parse_args()
    classified(options.folder, options.model_set, options.nodes).write_parquet(options.out)
