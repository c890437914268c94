"""Float networks to OpenVINO IR with everything folded in: what travels to a member is plain uint8.

Input uint8 (N, H, W, 3) BGR, output float32 (N, C) probabilities. Layout, colour order, mean, scale
and softmax are part of the network: no caller can get them wrong, and a quarter of the bytes
travel.
"""

from pathlib import Path

import openvino as ov
import torch
from openvino import opset13 as ops
from openvino.preprocess import ColorFormat, PrePostProcessor

from calibration.networks import MEAN_RGB, SCALE_RGB, build_network, load_weights
from calibration.rewrite import chain_concats


def convert_checkpoint(network: str, num_classes: int, weights: Path, input_size: int) -> ov.Model:
    """Convert a safetensors checkpoint of a torchvision network into a folded float model."""
    module = build_network(network, num_classes)
    load_weights(module, weights)
    module.eval()
    example = torch.zeros(1, 3, input_size, input_size)
    model = ov.convert_model(module, example_input=example, input=[-1, 3, input_size, input_size])
    model.friendly_name = network
    chain_concats(model)
    return fold(with_softmax(model), input_size)


def with_softmax(model: ov.Model) -> ov.Model:
    """Append softmax to a model that ends in logits (N, C)."""
    logits = model.output().get_node().input_value(0)
    probabilities = ops.softmax(logits, axis=1)
    probabilities.get_output_tensor(0).set_names({"probabilities"})
    return ov.Model([probabilities.output(0)], model.get_parameters(), model.friendly_name)


def fold(model: ov.Model, input_size: int) -> ov.Model:
    """Put uint8 NHWC BGR -> normalised float NCHW RGB in front of the model."""
    steps = PrePostProcessor(model)
    tensor = steps.input().tensor()
    tensor.set_element_type(ov.Type.u8).set_layout(ov.Layout("NHWC"))
    tensor.set_color_format(ColorFormat.BGR).set_shape([-1, input_size, input_size, 3])
    steps.input().model().set_layout(ov.Layout("NCHW"))
    chain = steps.input().preprocess().convert_element_type(ov.Type.f32)
    chain.convert_color(ColorFormat.RGB).mean(list(MEAN_RGB)).scale(list(SCALE_RGB))
    folded = steps.build()
    folded.input().set_names({"image"})
    return folded
