"""Renders a comparison of two sets of answers as a table, as JSON and as an HTML page."""

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from calibration.drift.answers import Answers
from calibration.drift.comparison import LEVEL, Difference, Drift
from models.extras import needs_extra

MAX_LISTED = 10  # classes in the table
MAX_DRAWN = 20  # classes on the page


def as_json(reference: Answers, samples: Answers, drift: Drift) -> dict[str, Any]:
    """Return the comparison as JSON values: verdict, tests, and every class."""
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


def _side(answers: Answers) -> dict[str, Any]:
    times = {"first": answers.first, "last": answers.last}
    shown = {name: time.isoformat() for name, time in times.items() if time is not None}
    return {"images": answers.num, "versions": answers.versions, **shown}


def verdict(reference: Answers, samples: Answers, drift: Drift) -> str:
    """Return a sentence that says whether there is drift, and in which of the tests."""
    named = [each.name for each in drift.differences if each.is_drift]
    if named:
        return f"drift: {', '.join(named)}"
    return (
        f"no drift: {samples.num} samples and {reference.num} references differ by no more than "
        "chance, or by too little to matter"
    )


def notes(reference: Answers, samples: Answers) -> list[str]:
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


def show(console: Console, reference: Answers, samples: Answers, drift: Drift) -> None:
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


def described(side: Answers) -> str:
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
        p_shown(each.adjusted_p),
        f"{each.effect_name} {each.effect:.2f}",
        f"{each.bound:g}",
        "yes" if each.is_drift else "no",
    )


def p_shown(value: float) -> str:
    """Return a p-value with 4 digits, or ``< 0.0001`` for smaller ones."""
    return "< 0.0001" if value < 1e-4 else f"{value:.4f}"


def render(title: str, reference: Answers, samples: Answers, drift: Drift) -> bytes:
    """Return the HTML page, which loads nothing over the network."""
    with needs_extra("calibrate", "drift --html"):
        from markupsafe import Markup

        from calibration.drift import plots
        from calibration.evaluation.reports.html import rendered
    return rendered(
        "calibration.drift",
        "page.html.j2",
        title=title,
        is_drift=drift.is_drift,
        verdict=verdict(reference, samples, drift),
        notes=notes(reference, samples),
        sides={"reference": described(reference), "samples": described(samples)},
        rows=[(_cells(each), each.is_drift) for each in drift.differences],
        level=LEVEL,
        num_more=max(0, len(drift.classes) - MAX_DRAWN),
        # matplotlib escapes what it draws
        classes=Markup(plots.class_shares(drift.classes[:MAX_DRAWN])),
        confidence=Markup(plots.confidence(reference.confidence, samples.confidence)),
    )
