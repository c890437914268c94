"""ONNX Runtime on the CPU: the extra ``onnxruntime``.

A member's file is an ONNX graph with its preprocessing folded in: uint8 (N, H, W, 3) BGR to float32
(N, C) probabilities. Batches of any size run without compiling. A file with a fixed batch size also
takes any number of images, and runs them in parts of that size.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from models.ensemble import Probabilities
from models.errors import ModelSetError
from models.extras import needs_extra
from models.record import RuntimeName
from models.runtimes.interface import LoadedNetwork, check_image
from models.runtimes.onnx_file import read_onnx
from models.runtimes.options import Pixels, RuntimeOptions

QUIET = 4  # the log level "fatal": errors are raised, and need not be on stderr too


class OnnxNetwork(LoadedNetwork):
    """A session, which any number of threads may run."""

    runtime: ClassVar[RuntimeName] = "onnxruntime"
    float_type = "f32"
    memory_bytes = 0  # set by models.runtimes.load
    kernels: tuple[str, ...] = ()  # ONNX Runtime hides them

    def __init__(self, path: Path, options: RuntimeOptions) -> None:
        """Load an ONNX file.

        Raises:
            MissingExtraError: onnxruntime is not installed.
            ModelSetError: the graph does not fit, has weights in other files, or needs operators or
                an opset that this onnxruntime lacks.

        """
        self.path, self.num_threads = path, options.num_threads
        with needs_extra("onnxruntime", f"{path.name}: a member that runs on ONNX Runtime"):
            import onnxruntime
        self.version = str(onnxruntime.__version__)
        content = read_onnx(path)
        try:
            self._session: Any = onnxruntime.InferenceSession(
                content, _session_options(onnxruntime, options), ["CPUExecutionProvider"]
            )
        except Exception as error:  # onnxruntime's errors have no common base
            raise ModelSetError(
                f"ONNX Runtime {self.version} cannot load {path}: {_first_line(error)}"
            ) from error
        self.input_shape, self.num_classes, self.fixed_batch = self._ends()
        sizes = {self.fixed_batch} if self.fixed_batch else set(options.batch_sizes)
        self._sizes = tuple(sorted(sizes))

    def _ends(self) -> tuple[tuple[int, ...], int, int | None]:
        """Return the images' shape, the number of classes, and the fixed batch size or None."""
        inputs, outputs = self._session.get_inputs(), self._session.get_outputs()
        if len(inputs) != 1 or len(outputs) != 1:
            raise ModelSetError(
                f"{self.path} has {len(inputs)} inputs and {len(outputs)} outputs; "
                "a member has one of each"
            )
        (taken,), (output,) = inputs, outputs
        sides = tuple(taken.shape)
        is_fixed = len(sides) == 4 and all(isinstance(side, int) for side in sides[1:])
        if taken.type != "tensor(uint8)" or not is_fixed or sides[3] != 3:
            raise ModelSetError(
                f"{self.path} takes {taken.type} {list(sides)}; a member takes uint8 [N,H,W,3] "
                "with H and W fixed: tandem models add folds the preprocessing in"
            )
        classes = output.shape[1] if len(output.shape) == 2 else None
        if output.type != "tensor(float)" or not isinstance(classes, int):
            raise ModelSetError(
                f"{self.path} gives {output.type} {output.shape}; a member gives float32 [N,C]"
            )
        self._names = [output.name], taken.name
        batch = sides[0] if isinstance(sides[0], int) else None
        return sides[1:], classes, batch

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        return self._sizes

    def add_batch_size(self, size: int) -> None:
        if self.fixed_batch is None:
            self._sizes = tuple(sorted({*self._sizes, size}))

    def remove_batch_size(self, size: int) -> None:
        self._sizes = tuple(of for of in self._sizes if of != size)

    def _run(self, images: Pixels | Sequence[Pixels]) -> Probabilities:
        for image in images:
            check_image(image, self.input_shape)
        batch = np.ascontiguousarray(images)  # (N, H, W, 3)
        if (num_absent := (self.fixed_batch or 0) - len(batch)) > 0:
            batch = np.concatenate([batch, np.zeros((num_absent, *self.input_shape), np.uint8)])
        outputs, name = self._names
        try:
            rows: Probabilities = self._session.run(outputs, {name: batch})[0]
        except Exception as error:  # as when loading
            problem = f"ONNX Runtime cannot run {self.path} on {len(batch)} images"
            raise ModelSetError(f"{problem}: {_first_line(error)}") from error
        if rows.shape != (len(batch), self.num_classes):
            problem = f"{self.path} answers {rows.shape} to {len(batch)} images"
            raise ModelSetError(problem)
        return np.asarray(rows, np.float32)[: len(images)]


def _session_options(onnxruntime: Any, options: RuntimeOptions) -> Any:
    """Return ONNX Runtime's options: a fixed number of threads, which do not spin.

    The calling thread takes part in its run. So with S streams of T threads the shared pool has S *
    (T - 1) threads, and ``intra_op_num_threads`` is that plus one caller. Spinning threads would
    take cores from the other members.
    """
    chosen = onnxruntime.SessionOptions()
    chosen.intra_op_num_threads = options.num_streams * (options.threads_each - 1) + 1
    chosen.inter_op_num_threads = 1
    chosen.log_severity_level = QUIET
    chosen.add_session_config_entry("session.intra_op.allow_spinning", "0")
    chosen.add_session_config_entry("session.inter_op.allow_spinning", "0")
    return chosen


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
