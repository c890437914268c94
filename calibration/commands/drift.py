"""``tandem drift``: compares samples of a service with a reference."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from calibration.commands.options import JsonFile, check_file, out
from models.errors import ModelSetError
from models.result_files import check_can_write, write_json, write_result


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
    from calibration.drift import report
    from calibration.drift.answers import Wanted, read_answers
    from calibration.drift.comparison import compare

    check_can_write(json_file)
    check_file(html, "--html")
    when = None if since is None else _time(since)
    before = read_answers(reference, Wanted(model_set, until=when))
    now = read_answers(samples, Wanted(model_set, version, since=when))
    result = compare(before, now)
    if str(json_file) != "-":
        report.show(out, before, now, result)
    write_json(json_file, report.as_json(before, now, result))
    if html is not None:
        page = report.render(f"Drift of {samples} from {reference}", before, now, result)
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
