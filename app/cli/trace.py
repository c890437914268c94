"""``tandem trace``: draws a request's timeline from the spans that this machine keeps."""

import json
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from app.errors import ConfigError
from app.settings import Settings
from models.result_files import check_can_write, write_result

if TYPE_CHECKING:
    from app.tracing.stored.traces import Trace

out = Console(highlight=False, emoji=False)
err = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False)

NOTHING = (
    "no traces in {place}: send a request to a service whose configuration enables tracing_config, "
    "or give its trace_dir with --dir"
)


def trace(
    request_id: Annotated[
        str | None,
        typer.Argument(help="X-Request-ID or trace id; without it the last requests are listed"),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--dir", help="folder of spans  (default: that of the setting trace_dir)"),
    ] = None,
    export: Annotated[
        Path | None, typer.Option(help="file for the trace as JSON that Jaeger's page opens")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the spans as JSON")] = False,
    last: Annotated[int, typer.Option(min=1, help="how many requests are listed")] = 20,
) -> None:
    """Draw a request's timeline, or list the last requests.

    A service keeps spans on its machine if its configuration enables tracing (tracing_config in
    serve_config.yaml). An answer's X-Request-ID header identifies the request. Exit code 1: there
    is no such request.
    """
    from app.tracing.stored.jaeger_json import as_jaeger
    from app.tracing.stored.traces import find_trace, latest_traces
    from app.tracing.stored.waterfall import draw

    place = folder or Settings.model_validate({}).trace_dir
    if place is None:
        raise ConfigError(
            "this account has no home folder; name the service's trace_dir with --dir"
        )
    if str(export) == "-":
        raise ConfigError("--export - is no file; name one, such as trace.json")
    check_can_write(export)
    if request_id is None and export is None:
        _list(place, latest_traces(place, last), as_json=as_json)
        return
    chosen = find_trace(place, request_id) if request_id else _newest(place)
    if as_json:
        typer.echo(json.dumps({"spans": chosen.spans, "batches": chosen.batches}, indent=2))
    else:
        draw(out, chosen)
    if export is not None:
        write_result(export, json.dumps(as_jaeger(chosen), indent=1) + "\n")
        err.print(f"wrote {escape(str(export))}; open it in Jaeger's page: Search, Upload")


def _newest(place: Path) -> "Trace":
    from app.tracing.stored.traces import latest_traces

    if not (newest := latest_traces(place, 1)):
        raise ConfigError(NOTHING.format(place=place))
    return newest[0]


def _list(place: Path, traces: "list[Trace]", *, as_json: bool) -> None:
    if as_json:
        rows = [
            {
                "request_id": trace.request_id,
                "trace_id": trace.root["trace_id"],
                "name": trace.root["name"],
                "start_ns": trace.root["start_ns"],
                "duration_ms": trace.duration_ms,
                "status": trace.status,
            }
            for trace in traces
        ]
        typer.echo(json.dumps(rows, indent=2))
        return
    if not traces:
        raise ConfigError(NOTHING.format(place=place))
    table = Table(box=None, pad_edge=False)
    for column in ("time", "request", "status", "ms", "request id"):
        is_name = column in ("request", "request id")
        table.add_column(column, no_wrap=not is_name, overflow="fold")
    for trace in traces:
        begun = datetime.fromtimestamp(trace.root["start_ns"] / 1e9).astimezone()
        table.add_row(
            f"{begun:%H:%M:%S}",
            escape(trace.root["name"]),
            str(trace.status or ""),
            f"{trace.duration_ms:.1f}",
            escape(trace.request_id),
        )
    out.print(table)
    err.print("tandem trace REQUEST_ID draws one")
