"""Restores torch weights from a float OpenVINO IR, for networks that normalise after convolving.

Conversion folds each batch normalisation into the convolution before it, which loses its scale and
statistics. Here the folded kernel and bias are restored to the convolution. The normalisation gets
the statistics of its inputs on images, with the scale and shift that cancel them. The network
computes the same as the IR, and its normalisations can be trained again.

ResNet can be restored. DenseNet normalises first, and its concatenated inputs cannot be separated.
"""

import numpy as np
import openvino as ov
import torch

from models.errors import ModelSetError

BATCH_NORM = "/aten::batch_norm/BatchNormInference"
FULLY_CONNECTED = "/aten::linear/MatMul"


def unfold(network: torch.nn.Module, model: ov.Model, batch: torch.Tensor) -> None:
    """Load the weights of ``model`` into ``network``.

    ``batch``, normalised float32 (N, 3, H, W) RGB, determines the statistics of normalisations.

    Raises:
        ModelSetError: the IR does not have the network's layers.

    """
    nodes = {node.get_friendly_name(): node for node in model.get_ordered_ops()}
    modules = dict(network.named_modules())
    norms = {n: m for n, m in modules.items() if isinstance(m, torch.nn.BatchNorm2d)}
    for name, norm in norms.items():
        add = nodes.get(f"__module.{name}{BATCH_NORM}")
        convolution = modules.get(_convolution_of(name))
        is_after = add is not None and (
            add.input_value(0).get_node().get_type_name() == "Convolution"
        )
        if add is None or not is_after or not isinstance(convolution, torch.nn.Conv2d):
            raise ModelSetError(
                f"{name} of the network is not a convolution and a shift in the IR; only networks "
                "that normalise after a convolution (ResNet) can be unfolded"
            )
        kernel = _constant(add.input_value(0).get_node().input_value(1).get_node())
        if kernel.shape[1] == 3:  # the first layer, which folding changed to BGR input
            kernel = kernel[:, ::-1]
        _fill(convolution.weight, kernel)
        for tensor, value in ((norm.weight, 1.0), (norm.running_mean, 0.0)):
            torch.nn.init.constant_(tensor, value)
        torch.nn.init.constant_(norm.running_var, 1 - norm.eps)
        _fill(norm.bias, _constant(add.input_value(1).get_node()))
    for name in (n for n, m in modules.items() if isinstance(m, torch.nn.Linear)):
        product = nodes[f"__module.{name}{FULLY_CONNECTED}"]
        (follower,) = product.output(0).get_target_inputs()
        _fill(modules[name].weight, _constant(product.input_value(1).get_node()))
        _fill(modules[name].bias, _constant(follower.get_node().input_value(1).get_node()))
    _give_statistics(network, norms, batch)


def _convolution_of(norm: str) -> str:
    """Return the convolution before a normalisation: conv1 of bn1, downsample.0 of .1."""
    if norm.endswith("downsample.1"):
        return norm.removesuffix("1") + "0"
    return norm.replace("bn", "conv")


def _constant(node: ov.Node) -> np.ndarray:
    """Return a constant's values, stored as FP16 or FP32."""
    if node.get_type_name() == "Convert":  # FP16, converted to FP32 at run time
        node = node.input_value(0).get_node()
    return np.array(node.get_data(), np.float32)


def _fill(tensor: torch.Tensor, value: np.ndarray) -> None:
    with torch.no_grad():
        tensor.copy_(torch.from_numpy(value.copy()).reshape(tensor.shape))


def _give_statistics(
    network: torch.nn.Module, norms: dict[str, torch.nn.Module], batch: torch.Tensor
) -> None:
    """Measure each normalisation's input; set scale and shift so that the output is unchanged."""
    statistics: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def record(name: str):  # type: ignore[no-untyped-def]  # noqa: ANN202
        def hook(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            variance, mean = torch.var_mean(inputs[0], dim=(0, 2, 3))
            statistics[name] = (mean, variance)

        return hook

    hooks = [norm.register_forward_pre_hook(record(name)) for name, norm in norms.items()]
    with torch.no_grad():
        network.eval()(batch)
        for hook in hooks:
            hook.remove()
        for name, norm in norms.items():
            mean, variance = statistics[name]
            norm.running_mean.copy_(mean)
            norm.running_var.copy_(variance)
            norm.weight.copy_((variance + norm.eps).sqrt())
            norm.bias.add_(mean)
