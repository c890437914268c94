"""Makes the bundled model set from two float checkpoints: ``python -m calibration.bundle --help``.

Convert, quantise, measure, write: the folder is built beside its place and moved there whole.
"""

import platform
import shutil
from collections import Counter
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import openvino as ov
import typer
from rich.console import Console

from calibration.convert import convert_checkpoint
from calibration.evaluate import Evaluation, evaluate
from calibration.folder import class_names, list_folder, read_pixels
from calibration.model_card import write_model_card
from calibration.networks import NETWORKS
from calibration.quantize import quantize
from models.cpus import cpu_model
from models.errors import ModelSetError
from models.manifest import (
    AccuracyRecord,
    FileRecord,
    ImageRecord,
    Manifest,
    MemberRecord,
    Network,
    Precision,
    sha256_of,
    write_manifest,
)
from models.model_set import ModelSet

IMAGENETTE = {
    "n01440764": "tench",
    "n02102040": "English springer",
    "n02979186": "cassette player",
    "n03000684": "chain saw",
    "n03028079": "church",
    "n03394916": "French horn",
    "n03417042": "garbage truck",
    "n03425413": "gas pump",
    "n03445777": "golf ball",
    "n03888257": "parachute",
}
DESCRIPTION = "Imagenette, ten easily told classes of ImageNet; trained from scratch for Tandem."
HINT = (
    "For ImageNet's 1000 classes (imagenet1k), make a model set from torchvision's ResNet50 and "
    "DenseNet169 weights, as models/imagenette is made, and start with --model-set FOLDER. One "
    "command that fetches it (tandem models fetch imagenet1k) is planned, not there yet."
)
console = Console()


def main(
    checkpoints: Annotated[Path, typer.Option(help="folder with <network>.safetensors of each")],
    calibration: Annotated[Path, typer.Option(help="ImageFolder to calibrate on", exists=True)],
    evaluation: Annotated[Path, typer.Option(help="ImageFolder to measure on", exists=True)],
    out: Annotated[Path, typer.Option(help="the set's folder, replaced when all is done")],
    input_size: Annotated[int, typer.Option(min=32, max=512)] = 128,
    resize_shorter: Annotated[int, typer.Option(help="0: input size * 8/7")] = 0,
    subset_size: Annotated[int, typer.Option(help="calibration images used", min=1)] = 300,
) -> None:
    """Make the set ``imagenette``: float (FP16-compressed) and INT8 networks, manifest, card."""
    image = ImageRecord(
        input_size=input_size, resize_shorter=resize_shorter or round(input_size * 8 / 7)
    )
    building = out.with_name(out.name + ".partial")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    try:
        manifest = _build(building, checkpoints, calibration, image, subset_size)
        records = _measure(ModelSet(building, manifest), evaluation)
        manifest = manifest.model_copy(update={"accuracy": records})
        write_manifest(building, manifest)
        write_model_card(building, manifest)
        shutil.rmtree(out, ignore_errors=True)
        building.replace(out)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    console.print(f"[green]{out} is ready[/]")


def _build(
    folder: Path, checkpoints: Path, calibration: Path, image: ImageRecord, subset_size: int
) -> Manifest:
    files = list_folder(calibration)
    classes = class_names(files)
    (folder / "labels.txt").write_text("".join(f"{IMAGENETTE[c]}\n" for c in classes), "utf-8")
    unreadable: list[str] = []
    pixels = [p for _, p in read_pixels(files, image.rule, unreadable)]
    if unreadable:
        raise ModelSetError(f"{len(unreadable)} calibration images cannot be read: {unreadable[0]}")
    members = []
    for name in NETWORKS:
        checkpoint = checkpoints / f"{name}.safetensors"
        console.print(f"[bold]{name}[/]: converting {checkpoint}")
        model = convert_checkpoint(name, len(classes), checkpoint, image.input_size)
        console.print(f"[bold]{name}[/]: quantising on {subset_size} images")
        networks: dict[Precision, Network] = {
            "FP16": _save(model, folder, f"{name}-fp16", is_float=True),
            "INT8": _save(quantize(model, pixels, subset_size), folder, f"{name}-int8"),
        }
        source = f"trained for Tandem; checkpoint sha256 {sha256_of(checkpoint)}"
        members.append(MemberRecord(name=name, source=source, networks=networks))
    return Manifest(
        name="imagenette",
        description=DESCRIPTION,
        image=image,
        num_classes=len(classes),
        labels=FileRecord.of(folder, "labels.txt"),
        members=tuple(members),
        hint=HINT,
    )


def _save(model: ov.Model, folder: Path, stem: str, is_float: bool = False) -> Network:
    ov.save_model(model, folder / f"{stem}.xml", compress_to_fp16=is_float)
    xml, weights = f"{stem}.xml", f"{stem}.bin"
    return Network(xml=FileRecord.of(folder, xml), bin=FileRecord.of(folder, weights))


def _measure(model_set: ModelSet, folder: Path) -> tuple[AccuracyRecord, ...]:
    precisions: tuple[Precision, ...] = ("FP16", "INT8")
    return tuple(_record(p, folder, evaluate(model_set, folder, p)) for p in precisions)


def _record(precision: Precision, folder: Path, measured: Evaluation) -> AccuracyRecord:
    counts = Counter(file.class_name for file in list_folder(folder))
    console.print(f"{precision}: " + ", ".join(f"{n} {v:.4f}" for n, v in measured.top1.items()))
    packages = ("openvino", "nncf", "numpy", "opencv-python-headless")
    return AccuracyRecord(
        dataset=f"{folder.parent.name}/{folder.name}, {len(counts)} classes",
        num_images=measured.num_images,
        precision=precision,
        float_type=measured.float_type,
        measured=date.today(),
        top1={name: round(value, 4) for name, value in measured.top1.items()},
        cpu=cpu_model(),
        versions={p: version(p) for p in packages} | {"python": platform.python_version()},
    )


if __name__ == "__main__":
    typer.run(main)
