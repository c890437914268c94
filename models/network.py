"""Networks in every runtime: their interface, the options for loading, and :func:`load`."""

import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from models.ensemble import Probabilities
from models.errors import ModelSetError
from models.files import why_not_written
from models.image import Size, sides_of
from models.record import SUFFIXES, FloatType, Precision, RuntimeName

logger = logging.getLogger(__name__)
STATM = Path("/proc/self/statm")  # pages: size, resident, ...
# Bytes of memory that each byte of a file takes, for each batch size, at the peak of a load. Fitted
# to the bundled networks, INT8 and float, within 5 % of each set (OpenVINO 2026.4, AVX512-VNNI).
GRAPH_TAKES, INT8_TAKES, F32_TAKES = 72, 1.0, 1.15
F16_TAKES = 2 * F32_TAKES  # computed in f32
ONNX_TAKES = 2  # once: ONNX Runtime has one session for all batch sizes
_FIXED_BATCH = re.compile(rb'<data shape="\d+,')  # of an IR's input, its first layer
Pixels = npt.NDArray[np.uint8]
Features = npt.NDArray[np.float32]  # (N, F), or (F,) of an image
Outputs = tuple[Probabilities, Features | None]


class LoadedNetwork(Protocol):
    """A network ready to run; several threads may call it at the same time."""

    runtime: ClassVar[RuntimeName]
    version: str  # of its package
    num_threads: int  # shared by its batches
    fixed_batch: int | None  # the only batch size, built into the file; None: any
    input_shape: tuple[int, ...]  # (H, W, 3)
    num_classes: int
    float_type: str  # the type in which layers that are not INT8 compute: f32 or bf16
    # Resident memory that loading added, in bytes. Approximate if several load at a time; the first
    # one of a runtime includes the runtime itself.
    memory_bytes: int
    no_features: str | None  # why it has no pooled features; None: it has

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The batch sizes for the queue, ascending."""

    @property
    def max_batch_size(self) -> int:
        """The largest batch that :meth:`predict` takes."""
        return self.batch_sizes[-1]

    @property
    def kernels(self) -> tuple[str, ...]:
        """The convolution kernels in use, the most frequent first; empty if they are unknown."""

    def predict(self, images: Pixels | Sequence[Pixels]) -> Probabilities:
        """Run uint8 (N, H, W, 3) BGR, or N of (H, W, 3), N up to ``max_batch_size``.

        A network with a fixed batch size takes any N, and runs that many at a time. The caller may
        change the rows, float32 (N, C). Raises :class:`ValueError` if there are too many or no
        images, or one has another shape or is not uint8.
        """
        return self.predict_all(images)[0]

    def predict_all(self, images: Pixels | Sequence[Pixels]) -> Outputs:
        """Return the rows of :meth:`predict`, and the images' pooled features, float32 (N, F).

        The features are None if the network has none: ``no_features`` says why.
        """
        num, step = len(images), self.fixed_batch
        if step and num > step:
            parts = [self._run(images[i : i + step]) for i in range(0, num, step)]
            features = [own for _, own in parts if own is not None]
            rows = np.concatenate([rows for rows, _ in parts])
            return rows, np.concatenate(features) if features else None
        if num > (most := self.batch_sizes[-1]) or not num:
            raise ValueError(f"a batch of {num} images; 1 to {most} are taken")
        return self._run(images)

    def _run(self, images: Pixels | Sequence[Pixels]) -> Outputs:
        """Run 1 to ``max_batch_size`` images, after :func:`check_image` of each."""

    def add_batch_size(self, size: int) -> None:
        """Add a batch size; may take seconds, during which other threads may predict.

        It has no effect on a network with a fixed batch size.
        """

    def remove_batch_size(self, size: int) -> None:
        """Remove an added batch size that no thread uses."""

    def check_fits(self, input_size: Size, num_classes: int) -> None:
        """Raise :class:`ModelSetError` unless input size and number of classes are these."""
        sides, wanted = self.input_shape[:2], sides_of(input_size)
        if (sides, self.num_classes) != (wanted, num_classes):
            raise ModelSetError(
                f"the network takes {sides[0]}x{sides[1]} and gives {self.num_classes} classes; "
                f"the manifest says {wanted[0]}x{wanted[1]} and {num_classes}: mend the manifest"
            )

    def warm_up(self) -> None:
        """Run every batch size once, since the first run allocates."""
        for size in self.batch_sizes:
            self.predict(np.zeros((size, *self.input_shape), np.uint8))


def check_image(image: Pixels, shape: tuple[int, ...]) -> None:
    """Raise :class:`ValueError` unless an image is uint8 of ``shape``.

    NumPy would cast another type, turning 0..1 into zeros, and broadcast a smaller image.
    """
    if image.dtype != np.uint8:
        raise ValueError(f"a batch of {image.dtype}; the network takes uint8, 0 to 255")
    if image.shape != shape:
        raise ValueError(f"an image of {image.shape}; the network takes {shape}")


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
    has_features: bool = False  # whether the network also gives its pooled features

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
        if (folder := self.cache_dir) is not None:
            if (problem := why_not_written(folder)) is None:
                chosen["CACHE_DIR"] = str(folder)
            else:  # it must not stop the service
                logger.warning("no compile cache: %s; starts will be slower", problem)
        return chosen


def load(path: Path, options: RuntimeOptions) -> LoadedNetwork:
    """Load a member's network, ready to run.

    Raises:
        MissingExtraError: its runtime is not installed.
        ModelSetError: the runtime cannot read the file, or it is not a member's network.
    """
    from models.openvino_network import CompiledNetwork  # it imports this module

    before = _resident_bytes()
    network: LoadedNetwork
    if path.suffix == SUFFIXES["openvino"]:
        network = CompiledNetwork(path, options)
    else:
        from models.onnx_runtime import OnnxNetwork  # an optional extra

        network = OnnxNetwork(path, options)
    network.memory_bytes = max(0, _resident_bytes() - before)
    return network


def memory_needed(path: Path, precision: Precision, num_sizes: int) -> int:
    """Estimate the bytes that loading a network takes, from its files; 0 if they are not there."""
    try:
        if path.suffix != SUFFIXES["openvino"]:
            return ONNX_TAKES * path.stat().st_size
        file, weights = path.read_bytes(), path.with_suffix(".bin").stat().st_size
    except OSError:
        return 0
    takes = F16_TAKES if b'element_type="f16"' in file else F32_TAKES
    each = GRAPH_TAKES * len(file) + (INT8_TAKES if precision == "INT8" else takes) * weights
    return int(each * (1 if _FIXED_BATCH.search(file[:1000]) else num_sizes))


def _resident_bytes() -> int:
    try:
        return int(STATM.read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
