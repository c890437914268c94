"""Networks that wait in place of computing, for a service that names ``images`` as preprocess.

A replica imports this module for its setting, and from then on each batch takes :data:`BATCH_S`
however many images it has and however busy the machine is: two cores carry many nodes.
"""

import time
from collections.abc import Sequence

import numpy as np

from models.network import Outputs, Pixels
from models.openvino_network import CompiledNetwork

BATCH_S = 0.4


def _wait(self: CompiledNetwork, images: Pixels | Sequence[Pixels]) -> Outputs:
    """Give the answer that the constant networks of tests/load/null_set.py give for one image."""
    time.sleep(BATCH_S)
    return np.repeat(_run(self, images[:1])[0], len(images), axis=0), None


_run, CompiledNetwork._run = CompiledNetwork._run, _wait  # type: ignore[method-assign]


def images(images: Pixels) -> Pixels:
    return images
