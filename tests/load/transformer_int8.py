"""What INT8 costs a vision transformer: ``python tests/load/transformer_int8.py DATA RUN_DIR``.

DATA is a folder with the ImageFolders train, calibration and eval (Imagenette, split as
models/imagenette/README.md says). A small ViT (timm's vit_tiny_patch16_224 with patches of 8 px on
64 px, 4 blocks) is trained on train from scratch, or taken from RUN_DIR, where it is kept; then it
is quantised twice on calibration, as NNCF recommends for transformers (what ``tandem quantize``
chooses) and as it quantises convolutions, and both are compared with the float network on eval:
by the commands ``tandem quantize`` and ``tandem evaluate``. Needs the extras train and timm.
"""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import torch
import typer
from machine import describe
from result_file import write_result

from calibration.sets.add_set import finish
from calibration.sets.convert import convert_module
from calibration.sets.networks import load_weights, timm_module
from calibration.sets.transaction import create
from calibration.training.augment import read_folders
from calibration.training.recipe import Recipe
from calibration.training.trainer import Trainer
from models.image_record import ImageRecord
from models.manifest import Manifest, MemberRecord, QuantizationOptions

NAME, ARCHITECTURE = "vit", "vit_tiny_patch16_224"
SIZE = 64  # px
SHAPE = {"img_size": SIZE, "patch_size": 8, "depth": 4}
# Of what ``tandem evaluate`` tells; the average of a network with itself says nothing.
KEPT = ("dataset", "images_sha256", "num_images", "max_drop", "float_type", "int8_kernels")
BY_MEMBER = ("drops", "size_mb", "cpu_ms_per_image")
# By member: what NNCF is told that the network is.
MODEL_TYPES = {"recommended": "transformer", "as_convolutional": "convolutional"}
TANDEM = Path(sys.executable).with_name("tandem")


def main(
    data: Annotated[Path, typer.Argument(help="holds train, calibration and eval", exists=True)],
    run_dir: Annotated[Path, typer.Argument(help="the network is trained here, and kept")],
    epochs: Annotated[int, typer.Option(min=1)] = 20,
    stop_after: Annotated[
        int | None, typer.Option(help="train so many epochs now and end; run again to go on")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the result here")] = None,
) -> None:
    """Train, quantise twice, evaluate; print the result as JSON."""
    run_dir.mkdir(parents=True, exist_ok=True)
    classes, seconds = _train(data / "train", run_dir, epochs, stop_after)
    if seconds is None:
        return
    with TemporaryDirectory() as work:
        folder = Path(work) / "transformer"
        _make_set(folder, run_dir / f"{NAME}.safetensors", classes)
        _tandem("quantize", folder, "--images", data / "calibration", "--json")
        record = _tandem("evaluate", folder, "--images", data / "eval", "--json", "-")
    result = {
        "machine": describe() | {"timm": version("timm"), "torch": version("torch")},
        "network": {"architecture": ARCHITECTURE, **SHAPE, "classes": len(classes)},
        "training": {"epochs": epochs, "cpu_seconds": seconds, "from": "random weights"},
        "evaluated": _of_members(record),
    }
    write_result(result, json_file)


def _train(
    images: Path, run_dir: Path, epochs: int, stop_after: int | None
) -> tuple[tuple[str, ...], float | None]:
    """Train what is left of ``epochs``; return the classes, and the CPU time if all are done."""
    torch.set_num_threads(1)  # a second one is worth little in a network this small
    data = read_folders([images])
    recipe = Recipe(sizes=((epochs, SIZE),))
    trainer = Trainer(NAME, len(data.classes), recipe, run_dir, build=_build)
    log = run_dir / f"{NAME}.jsonl"
    if trainer.checkpoint.exists():
        trainer.resume()
    for _ in range(min(epochs - trainer.epoch, stop_after or epochs)):
        started = os.times()
        loss = float(np.mean(list(trainer.run_epoch(data))))
        ended = os.times()
        spent = ended.user - started.user + ended.system - started.system
        trainer.save()
        line = {"epoch": trainer.epoch, "loss": round(loss, 4), "cpu_seconds": round(spent, 1)}
        with log.open("a") as opened:
            opened.write(json.dumps(line) + "\n")
        typer.echo(json.dumps(line), err=True)
    if trainer.epoch < epochs:
        return data.classes, None
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return data.classes, round(sum(line["cpu_seconds"] for line in lines), 0)


def _build(_: str, num_classes: int) -> torch.nn.Module:
    """Return the network; attention in small steps, which train faster than the fused one."""
    timm = timm_module()
    timm.layers.set_fused_attn(False)
    network: torch.nn.Module = timm.create_model(ARCHITECTURE, num_classes=num_classes, **SHAPE)
    timm.layers.set_fused_attn(True)  # as timm has it, for whoever builds the next one
    return network


def _make_set(folder: Path, weights: Path, classes: tuple[str, ...]) -> None:
    """Write a set of the same float network twice, to be quantised in two ways."""
    network = timm_module().create_model(ARCHITECTURE, num_classes=len(classes), **SHAPE)
    load_weights(network, weights)
    model = convert_module(network, NAME, SIZE)
    with create(folder) as staging:
        members = tuple(
            MemberRecord(
                name=name,
                source=f"timm {ARCHITECTURE} at {SIZE} px, trained from scratch",
                networks={"FP16": staging.network(model, f"{name}-fp16", is_float=True)},
                quantization=QuantizationOptions(model_type=told),
            )
            for name, told in MODEL_TYPES.items()
        )
        manifest = Manifest(
            name=folder.name,
            description="A small ViT, quantised in two ways.",
            image=ImageRecord(input_size=SIZE, resize_shorter=round(SIZE * 8 / 7)),
            num_classes=len(classes),
            labels=staging.text("labels.txt", "".join(f"{name}\n" for name in classes)),
            members=members,
        )
        finish(staging, manifest)


def _of_members(record: dict[str, Any]) -> dict[str, Any]:
    """Return what the evaluation says of each member, and of what it was measured on."""
    kept = {key: record[key] for key in (*KEPT, "versions")}
    kept["image"] = record["conditions"]["image"]
    kept["scores"] = {
        precision: {name: scores[name] for name in MODEL_TYPES}
        for precision, scores in record["scores"].items()
    }
    return kept | {key: {name: record[key][name] for name in MODEL_TYPES} for key in BY_MEMBER}


def _tandem(*arguments: object) -> dict[str, Any]:
    """Run a command; return its JSON. Exit code 1 is a drop over the limit: that is a result."""
    command = [TANDEM, *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(done.returncode)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


if __name__ == "__main__":
    typer.run(main)
