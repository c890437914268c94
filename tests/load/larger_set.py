"""The bundled networks at another input size: ``python tests/load/larger_set.py DIR --size 224``.

They were trained at 128 px and answer worse at 224; their speed is that of any ResNet50 and
DenseNet169 of that size, which is what a benchmark wants of them.
"""

from pathlib import Path
from typing import Annotated

import machine  # noqa: F401 (makes tests.support importable)
import typer

from calibration.sets.transaction import write_manifest
from models.manifest import Manifest
from models.model_set import load_model_set
from models.openvino_network import read_network
from models.record import FileRecord, ImageRecord
from tests.support.tiny_networks import record_golden, save_model

RESIZED = 256 / 224  # the shorter side, as torchvision's presets have it


def main(
    folder: Annotated[Path, typer.Argument(help="new")],
    size: Annotated[int, typer.Option(help="px", min=32)] = 224,
) -> None:
    """Write the set."""
    write_larger_set(folder, size)


def write_larger_set(folder: Path, size: int, name: str = "imagenette") -> Path:
    """Write the INT8 networks of the set ``name`` reshaped to ``size`` px."""
    source = load_model_set(name)
    folder.mkdir(parents=True)
    (folder / "labels.txt").write_text("\n".join(source.labels) + "\n", "utf-8")
    members = []
    for member in source.manifest.members:
        model = read_network(source.network_path(member.name))
        model.reshape([-1, size, size, 3])
        networks = {"INT8": save_model(model, folder, member.name)}
        members.append(member.model_copy(update={"networks": networks, "validation_drop": None}))
    written = Manifest(
        name=f"{name}-{size}",
        description=f"{name} at {size} px, for its speed",
        image=ImageRecord(input_size=size, resize_shorter=round(size * RESIZED)),
        num_classes=source.manifest.num_classes,
        labels=FileRecord.of(folder, "labels.txt"),
        members=tuple(members),
    )
    write_manifest(folder, written)
    record_golden(folder)
    return folder


if __name__ == "__main__":
    typer.run(main)
