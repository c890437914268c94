"""Runs PyTorch: eager, TorchScript or torch.compile, in a rung's memory format and float type."""

import shutil
import threading
from collections.abc import Sequence
from functools import partial

import torch

from calibration.ladder.engine import SEED, SkippedError, normalised, random_pixels
from calibration.ladder.measure import NetworkCall
from calibration.ladder.rung import RungOptions, RungTask
from calibration.ladder.torch_network import torch_network
from calibration.training.train import has_bf16
from models.ensemble import Probabilities
from models.runtime import Pixels

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
COMPILERS = ("c++", "g++", "clang++")


class TorchNetwork:
    """A network with an input tensor for each caller.

    Inputs are prepared float tensors, so preprocessing is not measured. OpenVINO's networks contain
    it, and there it is measured.
    """

    def __init__(self, task: RungTask, options: RungOptions) -> None:
        self._options = options
        self._of_thread = threading.local()
        check_possible(options)
        self._use_threads()
        network = torch_network(task).to(DTYPES[options.float_type])
        if options.is_channels_last:
            network = network.to(memory_format=torch.channels_last)
        self._inputs = [
            self._input(random_pixels(options.batch, task.network.size, SEED + n))
            for n in range(options.callers)
        ]
        self._network = self._optimised(network)
        self.notes = (f"PyTorch's threads: {torch.get_num_threads()}",)

    @property
    def calls(self) -> Sequence[NetworkCall]:
        return [partial(self._run, batch) for batch in self._inputs]

    def predict(self, pixels: Pixels) -> Probabilities:
        """Return the logits for a batch."""
        logits: Probabilities = self._run(self._input(pixels)).detach().float().numpy()
        return logits

    def _input(self, pixels: Pixels) -> torch.Tensor:
        tensor = torch.from_numpy(normalised(pixels)).to(DTYPES[self._options.float_type])
        if self._options.is_channels_last:
            tensor = tensor.contiguous(memory_format=torch.channels_last)
        return tensor

    def _optimised(self, network: torch.nn.Module) -> torch.nn.Module:
        if self._options.mode == "script":
            with torch.inference_mode():
                traced = torch.jit.trace(network, self._inputs[0])
                return torch.jit.freeze(traced)
        if self._options.mode == "compile":
            return torch.compile(network)  # compiles at the first call
        return network

    def _run(self, tensor: torch.Tensor) -> torch.Tensor:
        self._use_threads()
        with torch.inference_mode(mode=self._options.is_inference_mode):
            answer: torch.Tensor = self._network(tensor)
        return answer

    def _use_threads(self) -> None:
        """Set the number of threads; OpenMP keeps it separately for every calling thread."""
        if self._options.threads and not hasattr(self._of_thread, "is_set"):
            torch.set_num_threads(self._options.threads)
            self._of_thread.is_set = True


def check_possible(options: RungOptions) -> None:
    """Raise :class:`SkippedError` if this machine's PyTorch cannot run these options."""
    if options.float_type == "bf16" and not has_bf16():
        raise SkippedError(
            "this CPU has neither avx512_bf16 nor amx_bf16: PyTorch would emulate bfloat16"
        )
    if options.mode == "compile" and not any(shutil.which(name) for name in COMPILERS):
        raise SkippedError("torch.compile needs a C++ compiler (apt-get install g++)")


def example_input(task: RungTask) -> torch.Tensor:
    """Return float32 (2, 3, H, W) to trace or export a network with."""
    return torch.from_numpy(normalised(random_pixels(2, task.network.size)))
