"""Converts torchvision's networks to folded OpenVINO IR, and loads and saves their weights.

``python -m calibration.sets.convert --help`` is the command. safetensors contain only tensors, so
this project builds the architecture.
"""

import importlib
import json
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import openvino as ov
import torch
import typer
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from calibration.sets.ending import ENDINGS, gives
from calibration.sets.import_network import Imported, chain_concats
from calibration.sets.input import InputForm, Normalisation, fold, with_sigmoid, with_softmax
from calibration.sets.options import FileOptions, select_classes
from calibration.sets.transaction import writing
from models.errors import ModelSetError
from models.image import Size, sides_of
from models.record import Task

NETWORKS = ("resnet50", "densenet169")  # the bundled set's
# As torchvision builds them for its published weights.
OPTIONS: dict[str, dict[str, bool]] = {
    "googlenet": {"transform_input": True, "aux_logits": True, "init_weights": False},
    "inception_v3": {"transform_input": True, "aux_logits": True, "init_weights": False},
}
USUAL_SIZE = 224  # px, for ImageNet's networks
BATCH_NORM = "/aten::batch_norm/BatchNormInference"
FULLY_CONNECTED = "/aten::linear/MatMul"


def convert_module(
    module: torch.nn.Module,
    name: str,
    input_size: Size,
    normalisation: Normalisation | None = None,
    task: Task = "classification",
) -> ov.Model:
    """Convert a torch network, float (N, 3, H, W) RGB to logits, to a folded float model.

    A softmax is appended, or a sigmoid if ``task`` is multi_label.
    """
    module.eval()
    sides = [3, *sides_of(input_size)]
    with torch.no_grad():  # otherwise attention takes a path that cannot be traced
        example = torch.zeros(1, *sides)
        model = ov.convert_model(module, example_input=example, input=[-1, *sides])
    model.friendly_name = name
    chain_concats(model)
    ended = with_sigmoid(model) if task == "multi_label" else with_softmax(model)
    return fold(ended, InputForm(input_size), normalisation)


def convert_checkpoint(network: str, num_classes: int, weights: Path, input_size: int) -> ov.Model:
    """Convert a safetensors checkpoint of a torchvision network into a folded float model."""
    module = build_network(network, num_classes)
    load_weights(module, weights)
    return convert_module(module, network, input_size)


def main(
    network: Annotated[str, typer.Argument(help="resnet50 or densenet169")],
    checkpoint: Annotated[Path, typer.Argument(help="state dict (safetensors)", exists=True)],
    out: Annotated[Path, typer.Option(help="the IR to write, FILE.xml")],
    num_classes: Annotated[int, typer.Option(min=2)] = 10,
    input_size: Annotated[int, typer.Option(min=32, max=512, help="px")] = 128,
) -> None:
    """Write a checkpoint as float IR, folded, for ``tandem models add``."""
    model = convert_checkpoint(network, num_classes, checkpoint, input_size)
    with writing(out):
        ov.save_model(model, out, compress_to_fp16=True)
    typer.echo(f"wrote {out}")


def torchvision_models() -> Any:
    """Import ``torchvision.models`` with a CPU build of torch.

    The registry's torchvision is built for CUDA: with CPU torch its extension does not load, and
    its Python side then fails on two operators whose schemas it takes for granted. Only models are
    needed here, so the schemas are declared first; the library object must outlive the import.
    """
    try:
        return importlib.import_module("torchvision.models")
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
    schemas = torch.library.Library("torchvision", "DEF")
    schemas.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    schemas.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    module = importlib.import_module("torchvision.models")
    module._tandem_schemas = schemas  # type: ignore[attr-defined]
    return module


def timm_module() -> Any:
    """Import ``timm``, which imports torchvision: see :func:`torchvision_models`."""
    torchvision_models()
    return importlib.import_module("timm")


def known_networks() -> list[str]:
    """Return the names of torchvision's classification networks."""
    models = torchvision_models()
    return list(models.list_models(module=models))


def build_network(name: str, num_classes: int, input_size: Size | None = None) -> torch.nn.Module:
    """Return a new network of torchvision's: float32 (N, 3, H, W) RGB to logits (N, C).

    ``input_size`` is in pixels, for networks with a fixed size; None: torchvision's default. Raises
    :class:`ModelSetError` if torchvision has no network of that name.
    """
    if name not in NETWORKS and name not in (known := known_networks()):
        near = get_close_matches(name, known) or known[:5]
        raise ModelSetError(
            f"unknown network {name!r}; torchvision has {len(known)}, as {', '.join(near)}"
        )
    options: dict[str, Any] = dict(OPTIONS.get(name, {}))
    if name.startswith("vit_") and input_size is not None:
        options["image_size"] = input_size
    options |= {"weights": None, "num_classes": num_classes}
    network: torch.nn.Module = torchvision_models().get_model(name, **options)
    return network


def build_classifier(name: str, num_classes: int, input_size: Size) -> torch.nn.Module:
    """Return a new network in evaluation mode; raise :class:`ModelSetError` if it has no logits."""
    names = [known for known in known_networks() if known not in OPTIONS]  # with auxiliary outputs
    if name not in names:
        problem = f"torchvision has no classification network {name!r}; it has: "
        raise ModelSetError(problem + ", ".join(names))
    return build_network(name, num_classes, input_size).eval()


def load_weights(network: torch.nn.Module, path: Path) -> None:
    """Load a safetensors state dict (FP16 or FP32); no key may be missing or left over."""
    state = load_file(path)
    own = network.state_dict()
    if missing := own.keys() ^ state.keys():
        raise ModelSetError(
            f"{path} does not fit this network: {len(missing)} keys differ, as {min(missing)!r}"
        )
    network.load_state_dict({key: value.to(own[key].dtype) for key, value in state.items()})


def unfold(network: torch.nn.Module, model: ov.Model, batch: torch.Tensor) -> None:
    """Load the weights of a folded float IR into ``network``, which can then be trained again.

    Folding merged each batch normalisation into the convolution before it, and lost its scale and
    statistics. The folded kernel and bias go to the convolution. The normalisation gets the
    statistics of its inputs on ``batch``, with the scale and shift that cancel them. DenseNet
    normalises first: its concatenated inputs cannot be separated.

    Args:
        network: of torchvision, as the IR was converted from.
        model: the IR.
        batch: normalised float32 (N, 3, H, W) RGB.

    Raises:
        ModelSetError: the IR does not have the network's layers.
    """
    nodes = {node.get_friendly_name(): node for node in model.get_ordered_ops()}
    modules = dict(network.named_modules())
    hooks = []

    def keep_output(norm: Any, inputs: tuple[Any, ...]) -> None:
        """Give a normalisation its input's statistics, and the scale and shift that cancel them."""
        variance, mean = torch.var_mean(inputs[0], dim=(0, 2, 3))
        norm.running_mean.copy_(mean)
        norm.running_var.copy_(variance)
        norm.weight.copy_((variance + norm.eps).sqrt())
        norm.bias.add_(mean)

    for name, module in modules.items():
        if isinstance(module, torch.nn.Linear):
            product = nodes[f"__module.{name}{FULLY_CONNECTED}"]
            (follower,) = product.output(0).get_target_inputs()
            _fill(module.weight, _constant(product, 1))
            _fill(module.bias, _constant(follower.get_node(), 1))
        if not isinstance(module, torch.nn.BatchNorm2d):
            continue
        # The convolution before it: conv1 of bn1, downsample.0 of .1.
        before = name.replace("bn", "conv").replace("downsample.1", "downsample.0")
        add, convolution = nodes.get(f"__module.{name}{BATCH_NORM}"), modules.get(before)
        folded = None if add is None else add.input_value(0).get_node()
        is_after = folded is not None and folded.get_type_name() == "Convolution"
        if not is_after or not isinstance(convolution, torch.nn.Conv2d):
            raise ModelSetError(
                f"{name} of the network is not a convolution and a shift in the IR; only networks "
                "that normalise after a convolution (ResNet) can be unfolded"
            )
        kernel = _constant(folded, 1)
        if kernel.shape[1] == 3:  # the first layer, which folding changed to BGR input
            kernel = kernel[:, ::-1]
        _fill(convolution.weight, kernel)
        _fill(module.bias, _constant(add, 1))
        hooks.append(module.register_forward_pre_hook(keep_output))
    with torch.no_grad():
        network.eval()(batch)
    for hook in hooks:
        hook.remove()


def _constant(node: ov.Node, number: int) -> np.ndarray:
    """Return an input's values, a constant stored as FP16 or FP32."""
    constant = node.input_value(number).get_node()
    if constant.get_type_name() == "Convert":  # FP16, converted to FP32 at run time
        constant = constant.input_value(0).get_node()
    return np.array(constant.get_data(), np.float32)


def _fill(tensor: Any, value: np.ndarray) -> None:
    tensor.data.copy_(torch.from_numpy(value.copy()).reshape(tensor.shape))


def save_tensors(
    tensors: Mapping[str, torch.Tensor], path: Path, metadata: Mapping[str, Any] | None = None
) -> None:
    """Write ``tensors`` to ``path`` in one step: a reader never sees half a file."""
    partial = path.with_suffix(path.suffix + ".partial")
    contiguous = {key: value.detach().contiguous() for key, value in tensors.items()}
    save_file(contiguous, partial, metadata={"tandem": json.dumps(metadata or {})})
    partial.replace(path)


def read_metadata(path: Path) -> dict[str, Any]:
    """Return the JSON object :func:`save_tensors` stored with the tensors."""
    with safe_open(path, framework="pt") as opened:
        stored: dict[str, Any] = json.loads((opened.metadata() or {}).get("tandem", "{}"))
    return stored


def half(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the state dict with its float tensors in FP16, integers as they are."""
    return {
        key: value.half() if value.is_floating_point() else value for key, value in state.items()
    }


def import_state(path: Path, architecture: str, num_classes: int, options: FileOptions) -> Imported:
    """Build torchvision's ``architecture``, load the weights (safetensors), and convert it to IR.

    ``num_classes`` are the set's; a member with its own class ids has their number. The input size
    is 224 px by default. Raises :class:`ModelSetError` if torchvision has no such network, or the
    weights do not fit it.
    """
    classes, size = options.classes, options.input_size or USUAL_SIZE
    num = num_classes if classes is None else len(classes.own)
    module = build_network(architecture, num, size)
    try:
        load_weights(module, path)
    except ModelSetError:
        raise
    except Exception as error:  # safetensors and torch raise errors of their own
        problem = str(error).strip().partition("\n")[0]
        raise ModelSetError(f"{path} are no weights of {architecture}: {problem}") from error
    task = options.task or "classification"  # torchvision's networks end in logits
    model = convert_module(module, architecture, size, options.normalisation, task)
    if classes is not None:
        model = select_classes(model, classes, path, task)
    facts = f"takes {options.normalisation.formula()}; {gives(task, ENDINGS[task])}"
    doubt = options.normalisation.doubt
    return Imported(
        model, InputForm(size), num_classes, "FP16", task=task, facts=facts, doubt=doubt
    )


if __name__ == "__main__":
    typer.run(main)
