"""Post-training quantisation to INT8 with NNCF."""

import random
from collections.abc import Iterable, Sequence

import nncf
import numpy as np
import openvino as ov

from models.errors import ModelSetError
from models.runtime import Pixels

SEED = 20


def quantize(model: ov.Model, images: Sequence[Pixels], subset_size: int = 300) -> ov.Model:
    """Quantise a folded float model; ``images`` are uint8 (H, W, 3) BGR at the input size.

    MIXED keeps symmetric weights and lets activations be asymmetric: what both networks' ReLUs and
    DenseNet's concatenations want. Statistics come from ``subset_size`` images drawn with a fixed
    seed.
    """
    if len(images) < subset_size:
        raise ModelSetError(
            f"{len(images)} calibration images, {subset_size} are asked for; "
            "give more images or a smaller subset_size"
        )
    chosen = random.Random(SEED).sample(range(len(images)), subset_size)
    batches: Iterable[np.ndarray] = (images[i][np.newaxis] for i in chosen)
    dataset = nncf.Dataset(list(batches))
    quantized: ov.Model = nncf.quantize(
        model, dataset, preset=nncf.QuantizationPreset.MIXED, subset_size=subset_size
    )
    return quantized
