"""The file that the tests fetch, and what is there afterwards."""

from hashlib import sha256
from pathlib import Path

import numpy as np

DATA = np.random.default_rng(1).bytes(300_000)
PREFIX = sha256(DATA).hexdigest()[:8]


def names(path: Path) -> list[str]:
    return sorted(p.name for p in path.parent.iterdir())
