"""Loads a member's network with the runtime of its file's suffix."""

import os
from pathlib import Path

from models.network import LoadedNetwork, RuntimeOptions
from models.openvino_network import CompiledNetwork
from models.record import SUFFIXES

STATM = Path("/proc/self/statm")  # pages: size, resident, ...


def load(path: Path, options: RuntimeOptions) -> LoadedNetwork:
    """Load a member's network, ready to run.

    Raises:
        MissingExtraError: its runtime is not installed.
        ModelSetError: the runtime cannot read the file, or it is not a member's network.

    """
    before = _resident_bytes()
    network: LoadedNetwork
    if path.suffix == SUFFIXES["openvino"]:
        network = CompiledNetwork(path, options)
    else:
        from models.onnx_runtime import OnnxNetwork  # an optional extra

        network = OnnxNetwork(path, options)
    network.memory_bytes = max(0, _resident_bytes() - before)
    return network


def _resident_bytes() -> int:
    try:
        return int(STATM.read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
