"""Converts torch networks to folded OpenVINO IR: ``python -m calibration.sets.convert --help``."""

from pathlib import Path
from typing import Annotated

import openvino as ov
import torch
import typer

from calibration.sets.fold import Normalisation, fold, with_sigmoid, with_softmax
from calibration.sets.networks import build_network, load_weights
from calibration.sets.rewrite import chain_concats
from calibration.sets.staging import writing
from models.record import Task


def convert_module(
    module: torch.nn.Module,
    name: str,
    input_size: int,
    normalisation: Normalisation | None = None,
    task: Task = "classification",
) -> ov.Model:
    """Convert a torch network, float (N, 3, H, W) RGB to logits, to a folded float model.

    A softmax is appended, or a sigmoid if ``task`` is multi_label.
    """
    module.eval()
    example = torch.zeros(1, 3, input_size, input_size)
    with torch.no_grad():  # otherwise attention takes a path that cannot be traced
        model = ov.convert_model(
            module, example_input=example, input=[-1, 3, input_size, input_size]
        )
    model.friendly_name = name
    chain_concats(model)
    ended = with_sigmoid(model) if task == "multi_label" else with_softmax(model)
    return fold(ended, input_size, normalisation)


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


if __name__ == "__main__":
    typer.run(main)
