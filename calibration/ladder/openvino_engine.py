"""Runs OpenVINO: a member's IR with the properties of a rung."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openvino as ov

from calibration.ladder.engine import SEED, SkippedError, random_pixels
from calibration.ladder.measure import NetworkCall
from calibration.ladder.rung import INT8_NAME, RungNetwork, RungOptions, RungTask
from models.ensemble import Probabilities
from models.manifest import read_manifest
from models.model_set import ModelSet
from models.runtime import Pixels, compile_with, read_network


def member_ir(network: RungNetwork, precision: str, work: Path) -> Path:
    """Return the verified IR: the set's own, or the ladder's if the set has no INT8."""
    model_set = ModelSet(network.model_set, read_manifest(network.model_set))
    if precision == "INT8":
        if "INT8" not in model_set.manifest.member(network.name).networks:
            return work / INT8_NAME
        return _checked(model_set.network_path(network.name, "INT8"))
    return _checked(model_set.network_path(network.name, "FP16"))


def _checked(path: Path) -> Path:
    """Return the path of an IR; raise :class:`SkippedError` if it is for another runtime."""
    if path.suffix != ".xml":
        raise SkippedError(f"{path.name} is not for OpenVINO")
    return path


class OpenVinoNetwork:
    """A compiled IR and its infer requests, one for each parallel call."""

    def __init__(self, task: RungTask, options: RungOptions) -> None:
        model = read_network(member_ir(task.network, options.precision, task.work))
        size = task.network.size
        check_batch(model, options.batch)
        if options.is_static:
            model.reshape([options.batch, size, size, 3])
        compiled = compile_with(model, properties_of(options, task.cores))
        precision = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
        if precision != options.float_type:
            raise SkippedError(
                f"this CPU has no {options.float_type}: OpenVINO would compute in {precision}"
            )
        num_requests = (
            compiled.get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS")
            if options.hint == "throughput" or options.streams is not None
            else 1
        )
        shape = ov.Shape([options.batch, size, size, 3])
        self._requests = [_Request(compiled, shape, SEED + n) for n in range(num_requests)]
        streams = compiled.get_property("NUM_STREAMS")
        self.notes = (f"streams: {streams}, infer requests: {num_requests}",)

    @property
    def calls(self) -> Sequence[NetworkCall]:
        return [request.run for request in self._requests]

    def predict(self, pixels: Pixels) -> Probabilities:
        """Return the probabilities for a batch."""
        return self._requests[0].answer(pixels)


def check_batch(model: ov.Model, batch: int) -> None:
    """Raise :class:`SkippedError` if the network has a fixed batch size other than ``batch``."""
    number = model.input().partial_shape[0]
    if number.is_static and number.get_length() != batch:
        raise SkippedError(f"the network takes {number.get_length()} images at a time, not {batch}")


class _Request:
    """An infer request with its own input tensor, which OpenVINO's threads run."""

    def __init__(self, compiled: ov.CompiledModel, shape: ov.Shape, seed: int) -> None:
        self._request = compiled.create_infer_request()
        self._tensor = ov.Tensor(ov.Type.u8, shape)
        self._tensor.data[...] = random_pixels(shape[0], shape[1], seed)
        self._request.set_input_tensor(self._tensor)

    def run(self) -> None:
        self._request.start_async()
        self._request.wait()

    def answer(self, pixels: Pixels) -> Probabilities:
        self._tensor.data[...] = pixels
        self.run()
        rows: Probabilities = self._request.get_output_tensor(0).data.copy()
        return rows


def properties_of(options: RungOptions, cores: int) -> dict[str, Any]:
    """Return OpenVINO's properties for a rung.

    The number of threads and the float type are always set: OpenVINO ignores cgroup quotas, and
    uses bf16 by default on CPUs with it, which is a separate rung here.
    """
    properties: dict[str, Any] = {
        "INFERENCE_NUM_THREADS": options.threads or cores,
        "ENABLE_CPU_PINNING": False,
        "INFERENCE_PRECISION_HINT": options.float_type,
    }
    if options.hint != "none":
        properties["PERFORMANCE_HINT"] = options.hint.upper()
    if options.streams is not None:
        properties["NUM_STREAMS"] = options.streams
    return properties
