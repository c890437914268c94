"""The command ``tandem models fetch``: makes a model set of torchvision's ImageNet networks."""

from pathlib import Path
from typing import Annotated

import typer
from platformdirs import user_cache_path
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from calibration.commands.options import Into, Replace, one_of
from models.errors import ModelSetError
from models.extras import needs_extra
from models.model_set import user_sets_dir

err = Console(stderr=True, soft_wrap=True, highlight=False)


def fetch(
    name: Annotated[str, typer.Argument(metavar="SET", help="imagenet1k")],
    member: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME or NAME=WEIGHTS, any classification network of torchvision and which of its "
            "weights, else its best; once per member  (default: resnet50 and densenet169)"
        ),
    ] = None,
    resnet50: Annotated[
        str, typer.Option(help="V1 (2015's recipe) or V2 (2021's), without --member")
    ] = "V1",
    weights_dir: Annotated[
        Path | None,
        typer.Option(help="folder with the .pth files, fetched elsewhere; nothing is downloaded"),
    ] = None,
    mirror: Annotated[
        str | None, typer.Option(help="base URL that has the files, instead of the publisher's")
    ] = None,
    into: Into = None,
    replace: Replace = False,
) -> None:
    """Fetch float networks, convert them to OpenVINO with preprocessing folded in, write the set.

    Size, resizing, mean and scale of each are those of its weights. The files, about 155 MB without
    --member, come from download.pytorch.org, are checked by hash and kept in the user's cache; a
    broken download goes on where it was. HTTPS_PROXY is honoured. Next: tandem quantize.
    """
    from calibration.commands.add import tell

    one_of(name, ("imagenet1k",), "SET")
    version = one_of(resnet50.upper(), ("V1", "V2"), "--resnet50")
    if weights_dir is not None and not weights_dir.is_dir():
        raise ModelSetError(f"{weights_dir} is not a folder; give the one with the .pth files")
    with needs_extra("train", "models fetch"):
        from calibration.sets.torchvision_set import (
            Source,
            fetch_set,
            published_weights,
            weights_of,
        )

        weights = weights_of(member) if member else published_weights(f"IMAGENET1K_{version}")
    source = Source(user_cache_path("tandem") / "weights", weights_dir, mirror)
    columns = (TextColumn("downloading"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    progress = Progress(*columns, TimeRemainingColumn(), console=err, transient=True)
    with progress:
        task = progress.add_task("", total=None, visible=False)

        def report(there: int, total: int | None) -> None:
            progress.update(task, completed=there, total=total, visible=True)

        made = fetch_set(weights, into or user_sets_dir(), source, report, is_replaced=replace)
    tell(made)
