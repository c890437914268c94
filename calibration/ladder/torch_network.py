"""A ladder's PyTorch network: torchvision's with random weights, or one restored from an IR."""

from typing import Any

import numpy as np
import torch

from calibration.ladder.engine import SEED, SkippedError, normalised, random_pixels
from calibration.ladder.openvino_engine import member_ir
from calibration.ladder.rung import RungNetwork, RungTask
from calibration.ladder.unfold import unfold
from calibration.sets.networks import build_network, torchvision_models
from models.errors import ModelSetError
from models.runtime import CompiledNetwork, RuntimeOptions, read_network

ALIKE = 0.02  # of a probability; FP16 weights and other kernels differ by less


def torch_network(task: RungTask) -> torch.nn.Module:
    """Return the network in evaluation mode: float32 (N, 3, H, W) RGB, normalised, to logits.

    Raises:
        SkippedError: the member has no PyTorch source.
        ModelSetError: torchvision has no classification network of that name.

    """
    if task.network.torch_source == "random":
        return random_network(task.network)
    if task.network.torch_source == "float_ir":
        return _restored(task)
    raise SkippedError(no_source(task.network))


def no_source(network: RungNetwork) -> str:
    """Return why a member has no PyTorch rungs, and how to measure their speed."""
    return (
        f"member {network.name} is an OpenVINO network without its PyTorch source; "
        "tandem ladder NAME --random-weights measures a torchvision network of any size"
    )


def random_network(network: RungNetwork) -> torch.nn.Module:
    """Build a torchvision network with random weights, the same each time."""
    models = torchvision_models()
    names = classification_names(models)
    if network.name not in names:
        raise ModelSetError(
            f"torchvision has no classification network {network.name!r}; it has: "
            f"{', '.join(names)}"
        )
    arguments: dict[str, Any] = {"weights": None, "num_classes": network.num_classes}
    if network.name.startswith("vit_"):  # its position embedding has a fixed size
        arguments["image_size"] = network.size
    torch.manual_seed(SEED)
    built: torch.nn.Module = models.get_model(network.name, **arguments)
    return built.eval()


def classification_names(models: Any) -> list[str]:
    """Return torchvision's classification networks, without those only for training."""
    return [name for name in models.list_models(module=models) if name not in AUXILIARY]


# By default these return more than logits, or warn of slow random weights.
AUXILIARY = ("googlenet", "inception_v3")


def _restored(task: RungTask) -> torch.nn.Module:
    """Load the float IR's weights into the architecture, and check that the answers are equal."""
    network, ir = task.network, member_ir(task.network, "FP16", task.work)
    module = build_network(network.name, network.num_classes)
    pixels = random_pixels(4, network.size)
    batch = torch.from_numpy(normalised(pixels))
    try:
        unfold(module, read_network(ir), batch)
    except (ModelSetError, KeyError, RuntimeError) as error:
        raise SkippedError(f"{no_source(network)} (its IR does not fit: {error})") from error
    module.eval()
    options = RuntimeOptions(num_threads=task.cores, batch_sizes=(len(pixels),))
    expected = CompiledNetwork(ir, options).predict(pixels)
    with torch.inference_mode():
        answers = module(batch).softmax(1).numpy()
    if (difference := float(np.abs(answers - expected).max())) > ALIKE:
        raise SkippedError(
            f"{no_source(network)} (restored from its IR it answers otherwise, by {difference:.2f})"
        )
    return module
