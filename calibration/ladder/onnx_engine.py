"""Runs ONNX Runtime, and exports a network for it."""

from collections.abc import Sequence
from functools import partial

from calibration.ladder.engine import SEED, normalised, random_pixels
from calibration.ladder.measure import NetworkCall
from calibration.ladder.rung import ONNX_NAME, RungOptions, RungTask
from models.ensemble import Probabilities
from models.extras import needs_extra
from models.runtime import Pixels

INPUT, OUTPUT = "images", "logits"


def export(task: RungTask) -> None:
    """Export the PyTorch network with a dynamic batch; an incomplete file is removed."""
    with needs_extra("ladder", "ladder"):
        import onnxscript  # noqa: F401  (torch exports with it)
        import torch

        from calibration.ladder.torch_engine import example_input
        from calibration.ladder.torch_network import torch_network
    incomplete = task.work / "partial.onnx"
    torch.onnx.export(
        torch_network(task),
        (example_input(task),),
        incomplete,
        input_names=[INPUT],
        output_names=[OUTPUT],
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        dynamo=True,
        external_data=False,
        verbose=False,
    )
    incomplete.replace(task.work / ONNX_NAME)


class OnnxNetwork:
    """A session on the CPU, shared by callers with their own inputs."""

    def __init__(self, task: RungTask, options: RungOptions) -> None:
        with needs_extra("ladder", "ladder"):
            import onnxruntime
        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = options.threads or task.cores
        settings.inter_op_num_threads = 1
        settings.log_severity_level = 3
        self._session: onnxruntime.InferenceSession = onnxruntime.InferenceSession(
            str(task.work / ONNX_NAME), settings, providers=["CPUExecutionProvider"]
        )
        self._inputs = [
            normalised(random_pixels(options.batch, task.network.size, SEED + n))
            for n in range(options.callers)
        ]
        self.notes = (f"intra-op threads: {settings.intra_op_num_threads}",)

    @property
    def calls(self) -> Sequence[NetworkCall]:
        return [partial(self._session.run, [OUTPUT], {INPUT: batch}) for batch in self._inputs]

    def predict(self, pixels: Pixels) -> Probabilities:
        """Return the logits for a batch."""
        logits: Probabilities = self._session.run([OUTPUT], {INPUT: normalised(pixels)})[0]
        return logits
