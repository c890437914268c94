"""Options for loading a network: threads, batch sizes, float type."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from models.errors import ModelSetError
from models.record import FloatType

Pixels = npt.NDArray[np.uint8]
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RuntimeOptions:
    """How a network is compiled or loaded."""

    num_threads: int = 1
    batch_sizes: tuple[int, ...] = (1, 3, 8)
    num_streams: int = 1  # infer requests at a time, which share the threads
    # The type in which layers that are not INT8 compute. It is always set: by default OpenVINO uses
    # bf16 on CPUs with AVX512_BF16 or AMX, with other answers. CPUs without bf16 compute in f32,
    # and so do the other runtimes. See decision 0008.
    float_type: FloatType = "f32"
    cache_dir: Path | None = None  # for compiled models between starts (OpenVINO)

    def __post_init__(self) -> None:
        if self.num_threads < 1:
            raise ModelSetError(f"num_threads is {self.num_threads}; it must be 1 or more")
        if not 1 <= self.num_streams <= self.num_threads:
            raise ModelSetError(
                f"num_streams is {self.num_streams}; it must be 1 to num_threads {self.num_threads}"
            )
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            raise ModelSetError(f"batch_sizes is {self.batch_sizes}; give sizes of 1 or more")

    @property
    def threads_each(self) -> int:
        """The threads that work on a batch."""
        return self.num_threads // self.num_streams

    @property
    def properties(self) -> dict[str, Any]:
        """Return these options as OpenVINO's properties."""
        chosen: dict[str, Any] = {
            "PERFORMANCE_HINT": "LATENCY" if self.num_streams == 1 else "THROUGHPUT",
            "NUM_STREAMS": self.num_streams,
            "INFERENCE_NUM_THREADS": self.num_threads,
            "ENABLE_CPU_PINNING": False,
            "INFERENCE_PRECISION_HINT": self.float_type,
        }
        if self.cache_dir is not None and _can_write(self.cache_dir):
            chosen["CACHE_DIR"] = str(self.cache_dir)
        return chosen


def _can_write(folder: Path) -> bool:
    """Make the folder; an unwritable cache must not stop the service."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        logger.warning("no compile cache in %s: %s; starts will be slower", folder, error.strerror)
        return False
    return os.access(folder, os.W_OK)
