"""``tandem drift``: compares samples of a service with a reference, as a table, JSON and a page."""

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from calibration.commands.models import JsonFile, check_file, out
from calibration.drift import (
    LEVEL,
    Answers,
    ClassShare,
    Difference,
    Drift,
    Wanted,
    compare,
    read_answers,
)
from models.ensemble import PlanName
from models.errors import ModelSetError
from models.files import check_can_write, write_json, write_result
from models.machine import needs_extra

MAX_LISTED = 10  # classes in the table
MAX_DRAWN = 20  # classes on the page
PLAN_SHARE = 0.05  # from this difference on, a note says that other shares were answered fast
COLORS = {"reference": "#4a6fa5", "samples": "#c8703a"}
HEIGHT = 0.38  # of a bar, of the row that a class's two bars share


def drift(
    samples: Annotated[
        Path, typer.Option(help="folder of samples (sample_dir), or a record as --reference takes")
    ],
    reference: Annotated[
        Path,
        typer.Option(
            help="what to compare with: answers.jsonl or answers.parquet of "
            "tandem classify-offline --out, or a folder of earlier samples"
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
    plan: Annotated[
        PlanName | None, typer.Option(help="only answers by this plan, on both sides")
    ] = None,
    json_file: JsonFile = None,
    html: Annotated[Path | None, typer.Option(help="write a page with plots")] = None,
) -> None:
    """Say whether the photos that a service sees have changed.

    The share of each class, confidence and the members' agreement are tested.
    There is drift where a difference is beyond chance and large enough to matter.

    Exit code 1: there is drift.
    """
    check_can_write(json_file)
    check_file(html, "--html")
    when: datetime | None = None
    if since is not None:
        try:
            when = datetime.fromisoformat(since)
        except ValueError:
            problem = f"--since {since!r}: write a time as 2026-11-26 or 2026-11-26T08:00"
            raise ModelSetError(problem) from None
        when = when.replace(tzinfo=when.tzinfo or UTC)
    before = read_answers(reference, Wanted(model_set, plan=plan, until=when))
    now = read_answers(samples, Wanted(model_set, version, plan, since=when))
    result = compare(before, now)
    if str(json_file) != "-":
        _show(result)
    write_json(json_file, as_json(result))
    if html is not None:
        write_result(html, _page(f"Drift of {samples} from {reference}", result))
    if result.is_drift:
        raise typer.Exit(1)


def as_json(result: Drift) -> dict[str, Any]:
    """Return the comparison as JSON values: verdict, tests, and every class."""
    return {
        "drift": result.is_drift,
        "verdict": _verdict(result),
        "notes": _notes(result),
        "level": LEVEL,
        **{name: _side_as_json(side) for name, side in result.sides.items()},
        "differences": [asdict(each) | {"is_drift": each.is_drift} for each in result.differences],
        "classes": [asdict(share) | {"change": share.change} for share in result.classes],
    }


def _side_as_json(side: Answers) -> dict[str, Any]:
    times = {"first": side.first, "last": side.last}
    shown = {name: time.isoformat() for name, time in times.items() if time is not None}
    return {"images": side.num, "versions": side.versions, "plans": side.plans, **shown}


def _verdict(result: Drift) -> str:
    if named := [each.name for each in result.differences if each.is_drift]:
        return f"drift: {', '.join(named)}"
    return (
        f"no drift: {result.samples.num} samples and {result.reference.num} references differ by "
        "no more than chance, or by too little to matter"
    )


def _notes(result: Drift) -> list[str]:
    """Return notes on causes of a difference other than the photos: other versions or plans."""
    notes = list[str]()
    if set(result.reference.versions) != set(result.samples.versions):
        said = (f"{name} {', '.join(sorted(side.versions))}" for name, side in result.sides.items())
        note = "different versions answered, so a difference may come from the networks: "
        notes.append(note + "; ".join(said))
    fast = {name: side.plans.get("fast", 0) / side.num for name, side in result.sides.items()}
    if abs(fast["reference"] - fast["samples"]) >= PLAN_SHARE:
        shares = "; ".join(f"{name} {share:.0%}" for name, share in fast.items())
        notes.append(
            f"the fast plan answered different shares, so a difference may come from it: {shares}; "
            "compare each plan with itself: --plan full, --plan fast"
        )
    return notes


def _show(result: Drift) -> None:
    for name, side in result.sides.items():
        out.print(f"{name}: {_described(side)}", markup=False)
    table = Table("", "reference,\nsamples", "test, and p", "effect", "drift")
    for column in table.columns:
        column.no_wrap, column.overflow = True, "fold"
    for each in result.differences:
        name, before, now, test, p, effect, bound, drifts = _cells(each)
        rows = name, f"{before}\n{now}", f"{test}\n{p}", f"{effect}\nmatters from {bound}", drifts
        table.add_row(*rows, style="red" if each.is_drift else "")
    out.print(table)
    changed = Table("class", "reference", "samples", "change")
    for share in result.classes[:MAX_LISTED]:
        figures = f"{share.reference:.1%}", f"{share.samples:.1%}", f"{share.change * 100:+.1f}"
        changed.add_row(escape(share.label), *figures)
    out.print(changed)
    if (num_more := len(result.classes) - MAX_LISTED) > 0:
        out.print(f"{num_more} more classes changed less; --json has all")
    for note in _notes(result):
        out.print(f"[yellow]note:[/] {escape(note)}")
    color = "red" if result.is_drift else "green"
    out.print(f"[{color}]{_verdict(result)}[/]")


def _described(side: Answers) -> str:
    """Return a sentence with a side's number of images, their times, and the versions."""
    times = ""
    if side.first is not None and side.last is not None:
        times = f", {side.first:%Y-%m-%d %H:%M} to {side.last:%Y-%m-%d %H:%M} UTC"
    return f"{side.num} images{times}, answered by {', '.join(sorted(side.versions))}"


def _cells(each: Difference) -> tuple[str, ...]:
    return (
        each.name,
        *("" if value is None else f"{value:.3f}" for value in (each.reference, each.samples)),
        each.test,
        "< 0.0001" if each.adjusted_p < 1e-4 else f"{each.adjusted_p:.4f}",
        f"{each.effect_name} {each.effect:.2f}",
        f"{each.bound:g}",
        "yes" if each.is_drift else "no",
    )


def _page(title: str, result: Drift) -> bytes:
    with needs_extra("calibrate", "drift --html"):
        from markupsafe import Markup

        from calibration.evaluation.report_page import rendered
    return rendered(
        "calibration.commands",
        "drift.html.j2",
        title=title,
        is_drift=result.is_drift,
        verdict=_verdict(result),
        notes=_notes(result),
        sides={name: _described(side) for name, side in result.sides.items()},
        rows=[(_cells(each), each.is_drift) for each in result.differences],
        level=LEVEL,
        num_more=max(0, len(result.classes) - MAX_DRAWN),
        # matplotlib escapes what it draws
        classes=Markup(_class_plot(result.classes[:MAX_DRAWN])),
        confidence=Markup(_confidence_plot(result)),
    )


def _class_plot(classes: Sequence[ClassShare]) -> str:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from calibration.evaluation.report_page import STYLE, svg_of

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8, 1.2 + 0.42 * len(classes)))
        axes = figure.add_subplot()
        for name, shift in (("reference", -HEIGHT / 2), ("samples", HEIGHT / 2)):
            places = [place + shift for place in range(len(classes))]
            percents = [100 * getattr(share, name) for share in classes]
            axes.barh(places, percents, HEIGHT * 0.95, label=name, color=COLORS[name])
        # matplotlib takes no lone surrogates, which JSON's labels may have
        labels = [share.label.encode("utf-8", "replace").decode() for share in classes]
        axes.set_yticks(range(len(classes)), labels)
        axes.invert_yaxis()
        axes.set_xlabel("% of the images")
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
        return svg_of(figure)


def _confidence_plot(result: Drift) -> str:
    """Plot the cumulative distribution of the confidence; the test's D is the widest gap."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from calibration.evaluation.report_page import STYLE, svg_of

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7, 3.6))
        axes = figure.add_subplot()
        for name, side in result.sides.items():
            axes.ecdf(side.confidence, label=name, color=COLORS[name])
        axes.set_xlim(0, 1)
        axes.set_xlabel("confidence (probability of the first class)")
        axes.set_ylabel("share of images up to it")
        axes.legend(frameon=False, loc="upper left")
        return svg_of(figure)
