"""``tandem drift``: compares samples of a service with a reference, as a table, JSON and a page."""

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from calibration.commands.options import JsonFile, check_file, out
from models.errors import ModelSetError
from models.extras import needs_extra
from models.result_files import check_can_write, write_json, write_result

if TYPE_CHECKING:  # imported where they are used: tandem --help waits for none of it
    import numpy as np
    import numpy.typing as npt

    from calibration.drift import Answers, ClassShare, Difference, Drift


def drift(
    samples: Annotated[
        Path, typer.Option(help="folder of samples (sample_dir), or a record as --reference takes")
    ],
    reference: Annotated[
        Path,
        typer.Option(
            help="what to compare with: answers.jsonl or answers.parquet of tandem classify "
            "--offline --out, or a folder of earlier samples"
        ),
    ],
    since: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="samples from this time on, and of a reference with times those before: "
            "2026-11-26, or 2026-11-26T08:00; UTC unless it says otherwise",
        ),
    ] = None,
    model_set: Annotated[
        str | None, typer.Option(help="of samples of several sets: which one")
    ] = None,
    version: Annotated[
        str | None, typer.Option(help="only samples that this version (fingerprint) answered")
    ] = None,
    json_file: JsonFile = None,
    html: Annotated[Path | None, typer.Option(help="write a page with plots")] = None,
) -> None:
    """Say whether the photos that a service sees have changed.

    The share of each class, confidence and the members' agreement are tested.
    There is drift where a difference is beyond chance and large enough to matter.

    Exit code 1: there is drift.
    """
    from calibration.drift import Wanted, compare, read_answers

    check_can_write(json_file)
    check_file(html, "--html")
    when = None if since is None else _time(since)
    before = read_answers(reference, Wanted(model_set, until=when))
    now = read_answers(samples, Wanted(model_set, version, since=when))
    result = compare(before, now)
    if str(json_file) != "-":
        show(out, before, now, result)
    write_json(json_file, as_json(before, now, result))
    if html is not None:
        page = render(f"Drift of {samples} from {reference}", before, now, result)
        write_result(html, page)
    if result.is_drift:
        raise typer.Exit(1)


def _time(text: str) -> datetime:
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise ModelSetError(
            f"--since {text!r}: write a time as 2026-11-26 or 2026-11-26T08:00"
        ) from None
    return when.replace(tzinfo=when.tzinfo or UTC)


MAX_LISTED = 10  # classes in the table
MAX_DRAWN = 20  # classes on the page


def as_json(reference: "Answers", samples: "Answers", drift: "Drift") -> dict[str, Any]:
    """Return the comparison as JSON values: verdict, tests, and every class."""
    from calibration.drift import LEVEL

    return {
        "drift": drift.is_drift,
        "verdict": verdict(reference, samples, drift),
        "notes": notes(reference, samples),
        "level": LEVEL,
        "reference": _side(reference),
        "samples": _side(samples),
        "differences": [asdict(each) | {"is_drift": each.is_drift} for each in drift.differences],
        "classes": [asdict(share) | {"change": share.change} for share in drift.classes],
    }


def _side(answers: "Answers") -> dict[str, Any]:
    times = {"first": answers.first, "last": answers.last}
    shown = {name: time.isoformat() for name, time in times.items() if time is not None}
    return {"images": answers.num, "versions": answers.versions, **shown}


def verdict(reference: "Answers", samples: "Answers", drift: "Drift") -> str:
    """Return a sentence that says whether there is drift, and in which of the tests."""
    named = [each.name for each in drift.differences if each.is_drift]
    if named:
        return f"drift: {', '.join(named)}"
    return (
        f"no drift: {samples.num} samples and {reference.num} references differ by no more than "
        "chance, or by too little to matter"
    )


def notes(reference: "Answers", samples: "Answers") -> list[str]:
    """Return notes on causes of a difference other than the photos: other versions answered."""
    if set(reference.versions) == set(samples.versions):
        return []
    both = (", ".join(sorted(side.versions)) for side in (reference, samples))
    return [
        "different versions answered, so a difference may come from the networks: "
        + "; ".join(
            f"{name} {own}" for name, own in zip(("reference", "samples"), both, strict=True)
        )
    ]


def show(console: Console, reference: "Answers", samples: "Answers", drift: "Drift") -> None:
    """Print the tests, the classes that changed most, and the verdict."""
    for name, side in (("reference", reference), ("samples", samples)):
        console.print(f"{name}: {described(side)}", markup=False)
    table = Table("", "reference", "samples", "test", "p", "effect", "matters from", "drift")
    for each in drift.differences:
        style = "red" if each.is_drift else ""
        table.add_row(*_cells(each), style=style)
    console.print(table)
    changed = Table("class", "reference", "samples", "change")
    for share in drift.classes[:MAX_LISTED]:
        figures = f"{share.reference:.1%}", f"{share.samples:.1%}", f"{share.change * 100:+.1f}"
        changed.add_row(escape(share.label), *figures)
    console.print(changed)
    if (num_more := len(drift.classes) - MAX_LISTED) > 0:
        console.print(f"{num_more} more classes changed less; --json has all")
    for note in notes(reference, samples):
        console.print(f"[yellow]note:[/] {escape(note)}")
    color = "red" if drift.is_drift else "green"
    console.print(f"[{color}]{verdict(reference, samples, drift)}[/]")


def described(side: "Answers") -> str:
    """Return a sentence with a side's number of images, their times, and the versions."""
    times = ""
    if side.first is not None and side.last is not None:
        times = f", {side.first:%Y-%m-%d %H:%M} to {side.last:%Y-%m-%d %H:%M} UTC"
    return f"{side.num} images{times}, answered by {', '.join(sorted(side.versions))}"


def _cells(each: "Difference") -> tuple[str, ...]:
    return (
        each.name,
        *("" if value is None else f"{value:.3f}" for value in (each.reference, each.samples)),
        each.test,
        p_shown(each.adjusted_p),
        f"{each.effect_name} {each.effect:.2f}",
        f"{each.bound:g}",
        "yes" if each.is_drift else "no",
    )


def p_shown(value: float) -> str:
    """Return a p-value with 4 digits, or ``< 0.0001`` for smaller ones."""
    return "< 0.0001" if value < 1e-4 else f"{value:.4f}"


def render(title: str, reference: "Answers", samples: "Answers", drift: "Drift") -> bytes:
    """Return the HTML page, which loads nothing over the network."""
    with needs_extra("calibrate", "drift --html"):
        from markupsafe import Markup

        from calibration.drift import LEVEL
        from calibration.evaluation.reports.html import rendered
    return rendered(
        "calibration.commands",
        "drift.html.j2",
        title=title,
        is_drift=drift.is_drift,
        verdict=verdict(reference, samples, drift),
        notes=notes(reference, samples),
        sides={"reference": described(reference), "samples": described(samples)},
        rows=[(_cells(each), each.is_drift) for each in drift.differences],
        level=LEVEL,
        num_more=max(0, len(drift.classes) - MAX_DRAWN),
        # matplotlib escapes what it draws
        classes=Markup(_class_shares(drift.classes[:MAX_DRAWN])),
        confidence=Markup(_confidence(reference.confidence, samples.confidence)),
    )


COLORS = {"reference": "#4a6fa5", "samples": "#c8703a"}
HEIGHT = 0.38  # of a bar, of the row that a class's two bars share


def _class_shares(classes: "Sequence[ClassShare]") -> str:
    """Plot each class's share of the images on both sides, as bars."""
    import matplotlib as mpl
    import numpy as np
    from matplotlib.figure import Figure

    from calibration.evaluation.reports.plots import STYLE, svg_of

    places = np.arange(len(classes))
    values = {
        "reference": [share.reference for share in classes],
        "samples": [share.samples for share in classes],
    }
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8, 1.2 + 0.42 * len(classes)))
        axes = figure.add_subplot()
        for (name, shares), shift in zip(values.items(), (-HEIGHT / 2, HEIGHT / 2), strict=True):
            percents = [100 * share for share in shares]
            axes.barh(places + shift, percents, HEIGHT * 0.95, label=name, color=COLORS[name])
        # matplotlib takes no lone surrogates, which JSON's labels may have
        labels = [share.label.encode("utf-8", "replace").decode() for share in classes]
        axes.set_yticks(places, labels)
        axes.invert_yaxis()
        axes.set_xlabel("% of the images")
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
        return svg_of(figure)


def _confidence(reference: "npt.NDArray[np.float64]", samples: "npt.NDArray[np.float64]") -> str:
    """Plot the cumulative distribution of the confidence; the test's D is the widest gap."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from calibration.evaluation.reports.plots import STYLE, svg_of

    sides = {"reference": reference, "samples": samples}
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7, 3.6))
        axes = figure.add_subplot()
        for name, values in sides.items():
            axes.ecdf(values, label=name, color=COLORS[name])
        axes.set_xlim(0, 1)
        axes.set_xlabel("confidence (probability of the first class)")
        axes.set_ylabel("share of images up to it")
        axes.legend(frameon=False, loc="upper left")
        return svg_of(figure)
