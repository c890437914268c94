"""Sets made of networks in files, as ``tandem models add`` makes them, and what they answer."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibration.sets.add_set import NewSet, add_set
from models.ensemble import Probabilities
from models.errors import ModelSetError
from models.model_set import ModelSet
from models.network import RuntimeOptions, load
from models.record import RuntimeName
from tests.support.tiny_networks import LABELS

BOTH: tuple[RuntimeName, ...] = ("openvino", "onnxruntime")
both = pytest.mark.parametrize("runtime", BOTH)


def text(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines), "utf-8")
    return path


def content(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def added(folder, *paths, runtime=None, labels=LABELS, say=lambda *_: None, **facts):
    """Add a set whose members, ``m0`` and on, are these files; ``facts``: more of NewSet's."""
    members = [(f"m{number}", path) for number, path in enumerate(paths)]
    runtimes = {name: runtime for name, _ in members} if runtime else {}
    new = NewSet("made", members, text(folder / "labels.txt", *labels), runtimes=runtimes, **facts)
    return add_set(new, folder / "sets", is_replaced=True, say=say)


def refused(says: str, folder: Path, *paths: Path, **facts: Any) -> str:
    """Assert that no set is made, for this reason; return the message."""
    with pytest.raises(ModelSetError, match=says) as caught:
        added(folder, *paths, **facts)
    assert not (folder / "sets").exists()
    return caught.value.message


def rows_of(made: ModelSet, images: np.ndarray, member: str = "m0") -> Probabilities:
    """Return what a member answers to images, uint8 BGR (N, S, S, 3)."""
    (precision,) = made.manifest.member(member).networks
    network = load(made.network_path(member, precision), RuntimeOptions(batch_sizes=(1, 8)))
    network.check_fits(images.shape[1], made.manifest.num_classes)
    return network.predict(images)


def softmax(logits: np.ndarray) -> np.ndarray:
    exponentials = np.exp(logits - logits.max(1, keepdims=True))
    return exponentials / exponentials.sum(1, keepdims=True)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logits))
