"""Averages the weights of two trainings: ``python -m calibration.training.average --help``.

The mean of two runs that started from the same weights generalises better than either (Izmailov et
al. 2018, "Averaging weights leads to wider optima"). The statistics of batch normalisation are
measured again, as in that paper.
"""

from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors.torch import load_file

from calibration.sets.convert import build_network, save_tensors
from calibration.training.train import LabelledImages, normalised, read_folders, some_crops
from models.errors import ModelSetError

BATCH = 64


def average_weights(
    network: torch.nn.Module, first: Path, second: Path, data: LabelledImages, size: int
) -> None:
    """Load the mean of two state dicts into ``network``, with statistics from crops of ``data``.

    Raises :class:`ModelSetError` if the state dicts are of different networks.
    """
    of_first, of_second = load_file(first), load_file(second)
    if of_first.keys() != of_second.keys() or of_first.keys() != network.state_dict().keys():
        raise ModelSetError(f"{first} and {second} are not two trainings of this network")
    mean = {
        k: (v.float() + of_second[k].float()) / 2 if v.is_floating_point() else v
        for k, v in of_first.items()
    }
    network.load_state_dict(mean)
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.reset_running_stats()
            module.momentum = None  # the plain mean over all batches
    crops = some_crops(data, 24 * BATCH, size)
    network.train()
    with torch.no_grad():
        for start in range(0, len(crops), BATCH):
            network(normalised(crops[start : start + BATCH]))
    network.eval()


def main(
    name: Annotated[str, typer.Argument(help="resnet50 or densenet169")],
    first: Annotated[Path, typer.Argument(help="state dict (safetensors)", exists=True)],
    second: Annotated[Path, typer.Argument(help="another of the same network", exists=True)],
    images: Annotated[list[Path], typer.Option(help="ImageFolder(s) of training", exists=True)],
    out: Annotated[Path, typer.Option(help="the state dict to write")],
    size: Annotated[int, typer.Option(help="px")] = 128,
) -> None:
    """Write the mean of two state dicts, its normalisation measured on training crops."""
    data = read_folders(images)
    network = build_network(name, len(data.classes))
    average_weights(network, first, second, data, size)
    save_tensors(network.state_dict(), out)
    typer.echo(f"wrote {out}")


if __name__ == "__main__":
    try:
        typer.run(main)
    except ModelSetError as error:
        raise SystemExit(error.message) from None
