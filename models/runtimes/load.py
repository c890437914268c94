"""Loads a member's network with the runtime that its file is for."""

import os
from pathlib import Path

from models.errors import ModelSetError
from models.record import SUFFIXES, RuntimeName
from models.runtime import CompiledNetwork
from models.runtimes.interface import LoadedNetwork
from models.runtimes.options import RuntimeOptions

STATM = Path("/proc/self/statm")  # pages: size, resident, ...


def runtime_of(path: Path) -> RuntimeName:
    """Return the runtime that a member's file is for, by its suffix.

    Raises:
        ModelSetError: no runtime has such files.

    """
    for runtime, suffix in SUFFIXES.items():
        if path.suffix == suffix:
            return runtime
    there = ", ".join(f"{suffix} ({runtime})" for runtime, suffix in SUFFIXES.items())
    raise ModelSetError(f"no runtime for {path.name}: a member's file is {there}")


def load(path: Path, options: RuntimeOptions) -> LoadedNetwork:
    """Load a member's network, ready to run.

    Raises:
        MissingExtraError: its runtime is not installed.
        ModelSetError: the file is none of its runtime, or not what a member is.

    """
    runtime, before = runtime_of(path), _resident_bytes()
    network: LoadedNetwork
    if runtime == "openvino":
        network = CompiledNetwork(path, options)
    else:
        from models.runtimes.onnx_runtime import OnnxNetwork  # an extra: only for who needs it

        network = OnnxNetwork(path, options)
    network.memory_bytes = max(0, _resident_bytes() - before)
    return network


def _resident_bytes() -> int:
    try:
        return int(STATM.read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
