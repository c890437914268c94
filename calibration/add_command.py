"""``tandem models add``: networks of your own become a model set."""

from pathlib import Path
from typing import Annotated, Literal, TypeVar, cast

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape

from models.errors import ModelSetError
from models.extras import needs_extra
from models.model_set import ModelSet, user_sets_dir

out = Console(soft_wrap=True, highlight=False)
T = TypeVar("T")
IMAGENET_MEAN = "123.675,116.28,103.53"
IMAGENET_SCALE = "58.395,57.12,57.375"


def add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="of the new set")],
    member: Annotated[
        list[str],
        typer.Option(
            help="NAME=PATH of an ONNX or OpenVINO IR classifier; once per member, twice for one "
            "that has a float and an INT8 network"
        ),
    ],
    labels: Annotated[Path, typer.Option(help="one label per line, in the networks' order")],
    class_ids: Annotated[
        Path | None, typer.Option(help="the same, as datasets name their folders")
    ] = None,
    input_size: Annotated[
        int | None, typer.Option(min=1, help="px; needed only if the networks leave it open")
    ] = None,
    resize_shorter: Annotated[
        int | None, typer.Option(min=1, help="px before the crop  [default: input size * 8/7]")
    ] = None,
    mean: Annotated[str, typer.Option(help="on 0-255 pixels, as the colour order")] = IMAGENET_MEAN,
    scale: Annotated[str, typer.Option(help="deviations, likewise")] = IMAGENET_SCALE,
    color_order: Annotated[str, typer.Option(help="RGB or BGR, what the networks take")] = "RGB",
    outputs: Annotated[
        str, typer.Option(help="auto, logits or probabilities; auto runs them once and looks")
    ] = "auto",
    weight: Annotated[
        list[str] | None, typer.Option(help="NAME=W in the average  [default: 1 each]")
    ] = None,
    source: Annotated[
        list[str] | None, typer.Option(help="NAME=TEXT, where the weights came from")
    ] = None,
    description: Annotated[str, typer.Option(help="what it knows, for people")] = "",
    hint: Annotated[str, typer.Option(help="shown beside the classes on the page")] = "",
    max_drop: Annotated[
        float, typer.Option(min=0, max=1, help="of top-1 that INT8 may cost, a fraction")
    ] = 0.005,
    into: Annotated[
        Path | None, typer.Option(help="folder of sets  [default: the user's own]")
    ] = None,
    replace: Annotated[bool, typer.Option(help="a set of that name, if there is one")] = False,
) -> None:
    """Make a model set of classifiers that OpenVINO reads; preprocessing and softmax are folded in.

    Sizes, class counts and labels are checked against each other. Then: tandem quantize NAME,
    tandem evaluate NAME, tandem serve --model-set NAME.
    """
    with needs_extra("calibrate", "models add"):
        from calibration.add_set import NewSet, add_set
        from calibration.fold import Normalisation
    try:
        new = NewSet(
            name=name,
            members=[(key, Path(value)) for key, value in pairs(member, "--member")],
            labels=labels,
            class_ids=class_ids,
            input_size=input_size,
            resize_shorter=resize_shorter,
            normalisation=Normalisation(
                triple(mean, "--mean"),
                triple(scale, "--scale"),
                cast(Literal["RGB", "BGR"], one_of(color_order, ("RGB", "BGR"), "--color-order")),
            ),
            outputs=cast(
                Literal["auto", "logits", "probabilities"],
                one_of(outputs, ("auto", "logits", "probabilities"), "--outputs"),
            ),
            weights={k: _number(v, "--weight") for k, v in pairs(weight or [], "--weight")},
            sources=dict(pairs(source or [], "--source")),
            description=description,
            hint=hint,
            max_drop=max_drop,
        )
        made = add_set(new, into or user_sets_dir(), is_replaced=replace)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "set"
        given = first["input"]
        told = f" (given: {given!r})" if isinstance(given, str | int | float) else ""
        raise ModelSetError(f"{where}: {first['msg']}{told}") from error
    tell(made)


def tell(made: ModelSet) -> None:
    """Say what was made and what to do with it next."""
    out.print(f"[green]{escape(str(made.folder))}[/] is there")
    for record in made.manifest.members:
        out.print(f"  {record.name}: {', '.join(record.networks)}")
    is_found = made.folder.parent == user_sets_dir()  # by its name; another by its path
    folder = escape(made.name if is_found else str(made.folder.resolve()))
    if any("INT8" not in record.networks for record in made.manifest.members):
        out.print(f"next: tandem quantize {folder} --images DIR, then")
    out.print(f"tandem evaluate {folder} --images DIR; tandem serve --model-set {folder}")


def pairs(texts: list[str], option: str) -> list[tuple[str, str]]:
    """Split NAME=VALUE options."""
    found = []
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals and value):
            raise ModelSetError(f"{option} {text!r}: write NAME=VALUE")
        found.append((key, value))
    return found


def triple(text: str, option: str) -> tuple[float, float, float]:
    """Read three finite numbers, one per channel."""
    parts = [_number(part, option) for part in text.split(",")]
    if len(parts) == 1:
        parts *= 3
    if len(parts) != 3 or (option == "--scale" and 0 in parts):
        raise ModelSetError(f"{option} {text!r}: write one number, or three for three channels")
    return parts[0], parts[1], parts[2]


def one_of(value: str, choices: tuple[str, ...], option: str) -> str:
    """Return ``value`` if it is a choice."""
    if value not in choices:
        raise ModelSetError(f"{option} {value!r}: one of {', '.join(choices)}")
    return value


def _number(text: str, option: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ModelSetError(f"{option}: {text!r} is not a number") from None
    if not abs(value) < 1e9:  # NaN and infinity too
        raise ModelSetError(f"{option}: {text} is no finite number")
    return value
