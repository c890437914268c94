"""Measures each member's cost: CPU time per image, and memory."""

from dataclasses import dataclass
from time import process_time

import numpy as np
import openvino as ov
import psutil
from openvino import opset13 as ops

from calibration.evaluation.inference import BATCH
from models.model_set import ModelSet
from models.record import Precision
from models.runtime import CompiledNetwork, RuntimeOptions
from models.runtimes.interface import LoadedNetwork
from models.runtimes.load import load

NUM_ROUNDS = 7


@dataclass(frozen=True)
class MemberCost:
    """The cost of one network on one thread."""

    cpu_ms: float  # per image, in batches of 8
    memory_mb: float  # 10**6 bytes by which compiling and the first run enlarged the process


def measure_costs(model_set: ModelSet, precision: Precision) -> dict[str, MemberCost]:
    """Compile and run every member separately in this process.

    All members stay compiled until the last has run, so that none reuses memory that another freed.
    Rounds of timing alternate between members, and each member's least time counts, so that other
    load on the machine affects all alike.
    """
    unmeasured = _first_of_all()
    networks: dict[str, LoadedNetwork] = {}
    grown: dict[str, int] = {}
    process = psutil.Process()
    for member in model_set.manifest.members:
        before = process.memory_info().rss
        networks[member.name] = network = _loaded(model_set, member.name, precision)
        network.warm_up()
        grown[member.name] = max(0, process.memory_info().rss - before)
    least = dict.fromkeys(networks, float("inf"))
    for _ in range(NUM_ROUNDS):
        for name, network in networks.items():
            least[name] = min(least[name], _cpu_ms(network))
    del unmeasured
    return {name: MemberCost(round(least[name], 3), round(grown[name] / 1e6, 1)) for name in least}


def _first_of_all() -> CompiledNetwork:
    """Run a small network, so that OpenVINO's own initialisation is not counted for a member."""
    pixels = ops.parameter([-1, 8, 8, 3], ov.Type.u8)
    planes = ops.transpose(ops.convert(pixels, "f32"), np.array([0, 3, 1, 2]))
    kernel = np.ones((8, 3, 3, 3), np.float32)
    features = ops.relu(ops.convolution(planes, kernel, [1, 1], [1, 1], [1, 1], [1, 1]))
    means = ops.reduce_mean(features, np.array([2, 3]), keep_dims=False)
    model = ov.Model([ops.softmax(means, 1)], [pixels], "first")
    network = CompiledNetwork(model, RuntimeOptions(batch_sizes=(BATCH,)))
    network.warm_up()
    return network


def _loaded(model_set: ModelSet, member: str, precision: Precision) -> LoadedNetwork:
    float_type = "f32" if precision == "FP16" else model_set.manifest.float_type
    options = RuntimeOptions(batch_sizes=(BATCH,), float_type=float_type)
    return load(model_set.network_path(member, precision), options)


def _cpu_ms(network: LoadedNetwork) -> float:
    size = network.fixed_batch or BATCH
    images = np.full((size, *network.input_shape), 127, np.uint8)
    started = process_time()
    network.predict(images)
    return (process_time() - started) / size * 1e3
