"""Loads a member's network with its file's runtime."""

import os
from pathlib import Path

from models.errors import ModelSetError
from models.record import SUFFIXES, RuntimeName
from models.runtime import CompiledNetwork
from models.runtimes.interface import LoadedNetwork
from models.runtimes.options import RuntimeOptions

STATM = Path("/proc/self/statm")  # pages: size, resident, ...


def runtime_of(path: Path) -> RuntimeName:
    """Return the runtime of a member's file, by its suffix.

    Raises:
        ModelSetError: no runtime has files with this suffix.

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
        ModelSetError: the runtime cannot read the file, or it is not a member's network.

    """
    runtime, before = runtime_of(path), _resident_bytes()
    network: LoadedNetwork
    if runtime == "openvino":
        network = CompiledNetwork(path, options)
    else:
        from models.runtimes.onnx_runtime import OnnxNetwork  # an optional extra

        network = OnnxNetwork(path, options)
    network.memory_bytes = max(0, _resident_bytes() - before)
    return network


def _resident_bytes() -> int:
    try:
        return int(STATM.read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
