"""Trains the bundled set's float networks: ``python -m calibration.training.train --help``.

Continues from a checkpoint (``--init`` a state dict, or the run's own after an interruption) and
writes one after every epoch, so Ctrl-C costs at most the epoch that was running.
"""

import json
import math
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import track

from calibration.datasets.labelled import folder_files
from calibration.sets.networks import NETWORKS
from calibration.training.augment import LabelledImages, read_folders
from calibration.training.recipe import Recipe, parse_sizes
from calibration.training.teacher import Teacher
from calibration.training.trainer import Trainer
from models.errors import ImageError, ModelSetError, TandemError
from models.image import ImageRule, read_image
from models.runtime import Pixels

Files = list[tuple[Path, str]]  # images and their classes
console = Console(emoji=False)


def train(
    network: Annotated[str, typer.Argument(help=f"one of {', '.join(NETWORKS)}")],
    images: Annotated[list[Path], typer.Option(help="ImageFolder(s) to train on", exists=True)],
    run_dir: Annotated[Path, typer.Option(help="where checkpoints and the log go")],
    init: Annotated[
        Path | None, typer.Option(help="state dict (safetensors) to start from", exists=True)
    ] = None,
    evaluate: Annotated[
        Path | None, typer.Option(help="ImageFolder measured every few epochs", exists=True)
    ] = None,
    evaluate_every: Annotated[int, typer.Option(help="epochs", min=1)] = 5,
    sizes: Annotated[str, typer.Option(help="EPOCHSxPIXELS, comma separated")] = "40x96,10x128",
    peak_rate: Annotated[float, typer.Option(help="learning rate")] = Recipe.peak_rate,
    teacher: Annotated[
        Path | None, typer.Option(help="folded IR whose answers are learnt instead of the labels")
    ] = None,
    threads: Annotated[int, typer.Option(help="0: all cores", min=0)] = 0,
    max_steps: Annotated[
        int | None, typer.Option(help="per epoch; to try things out", min=1)
    ] = None,
) -> None:
    """Train one float network; run again with the same --run-dir to resume."""
    if threads:
        torch.set_num_threads(threads)
    data = read_folders(images)
    files = _checked(evaluate, data.classes) if evaluate else []
    run_dir.mkdir(parents=True, exist_ok=True)
    recipe = Recipe(sizes=parse_sizes(sizes), peak_rate=peak_rate)
    distilled_from = Teacher(teacher) if teacher else None
    trainer = Trainer(network, len(data.classes), recipe, run_dir, distilled_from)
    if trainer.checkpoint.exists():
        trainer.resume()
        console.print(f"resumed after epoch {trainer.epoch} of {recipe.num_epochs}")
    elif init is not None:
        trainer.start_from(init)
    while trainer.epoch < recipe.num_epochs:
        line = _train_one_epoch(trainer, data, max_steps)
        trainer.save()
        is_last = trainer.epoch == recipe.num_epochs
        if files and (is_last or trainer.epoch % evaluate_every == 0):
            line |= _accuracy(trainer, files, data.classes)
        with (run_dir / f"{network}.jsonl").open("a") as log:
            log.write(json.dumps(line) + "\n")
        console.print(json.dumps(line), soft_wrap=True)


def _train_one_epoch(
    trainer: Trainer, data: LabelledImages, max_steps: int | None
) -> dict[str, Any]:
    started, epoch, size = time.perf_counter(), trainer.epoch, trainer.recipe.size_at(trainer.epoch)
    what = f"epoch {epoch + 1}/{trainer.recipe.num_epochs} at {size} px"
    steps = trainer.run_epoch(data, max_steps)
    total = trainer.num_steps(data, max_steps)
    shown = track(steps, what, total, console=console, transient=True)
    loss = float(np.mean(list(shown)))
    seconds = round(time.perf_counter() - started, 1)
    return {"epoch": epoch + 1, "px": size, "loss": round(loss, 4), "seconds": seconds}


def _checked(folder: Path, classes: tuple[str, ...]) -> Files:
    """Return the files to measure accuracy on; raise if they are of other classes."""
    files = folder_files(folder)
    there = tuple(sorted({name for _, name in files}))
    if there != classes:
        raise ModelSetError(f"{folder} has classes {there}, the training set {classes}")
    if not any(_read(files, ImageRule(32, 37))):
        raise ModelSetError(f"none of the {len(files)} images of {folder} can be read")
    return files


def _accuracy(trainer: Trainer, files: Files, classes: tuple[str, ...]) -> dict[str, float]:
    """Measure accuracy slightly above the training size, where it is best (Touvron 2019)."""
    size = math.ceil(trainer.recipe.size_at(trainer.epoch - 1) * 1.15 / 16) * 16
    rows = list(_read(files, ImageRule(size, round(size * 8 / 7))))
    pixels = np.stack([image[:, :, ::-1] for image, _ in rows])  # (N, H, W, 3) RGB
    labels = np.array([classes.index(name) for _, name in rows], np.int64)
    return {f"top1_at_{size}": round(trainer.accuracy(pixels, labels), 4)}


def _read(files: Files, rule: ImageRule) -> Iterator[tuple[Pixels, str]]:
    """Yield (uint8 (H, W, 3) BGR, class) for each file, without unreadable ones."""
    for path, name in files:
        with suppress(ImageError, OSError):
            yield read_image(path.read_bytes(), rule), name


if __name__ == "__main__":
    try:
        typer.run(train)
    except TandemError as error:
        console.print(f"[red]{error.message}[/]")
        raise SystemExit(2) from None
