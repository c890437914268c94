"""``tandem classify``: sends files, folders and globs to a running service."""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from app.cli.options import ClientCert, ClientKey, KeyFile, Roots
from models.api_keys import sent_key
from models.client_tls import ClientTls
from models.image_files import find_files

if TYPE_CHECKING:
    from tandem_client import Client, TandemError

DEFAULT_URL = "http://127.0.0.1:8000"
CONCURRENCY = 8  # enough to fill a batch; more only waits in the service's queues
TIMEOUT_S = 60.0  # of a file, with all its attempts

out, err = Console(), Console(stderr=True, soft_wrap=True, highlight=False)
ClassifiedFile = dict[str, Any]  # {"file": str, **answer} or {"file": str, "error": {...}}


class Wanted(NamedTuple):
    """What an answer is to list."""

    top_k: int
    threshold: float | None


def classify(
    paths: Annotated[list[str], typer.Argument(help="files, folders (all images in them), globs")],
    url: Annotated[str, typer.Option(help="a running service")] = DEFAULT_URL,
    top_k: Annotated[int, typer.Option(min=1, help="classes per image, at most")] = 1,
    threshold: Annotated[
        float | None,
        typer.Option(help="of a multi-label set: the least score of a label  (default: the set's)"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object per line")] = False,
    key_file: KeyFile = None,
    ca: Roots = None,
    client_cert: ClientCert = None,
    client_key: ClientKey = None,
) -> None:
    """Send images to a running service and print their labels; exit code 1 if any failed."""
    files, tls = list(find_files(paths)), ClientTls(ca, client_cert, client_key)
    with _client(url, sent_key(key_file), tls) as client:
        wanted = Wanted(top_k, threshold)
        num_failed = _run(client, files, url, wanted, as_json)
    if num_failed:
        err.print(f"[red]{num_failed} of {len(files)} failed[/]")
        raise typer.Exit(1)


def _client(url: str, api_key: str | None, tls: ClientTls) -> "Client":
    """Return a client that tries again what was refused or cut off.

    Not what nobody listens to: that would take its time for each of a thousand files.
    """
    from tandem_client import Client, RetryPolicy

    policy = RetryPolicy(on=frozenset({"overloaded", "not_ready", "reset"}))
    return Client(url, api_key=api_key, timeout=TIMEOUT_S, retry=policy, tls=tls.context())


def _run(client: "Client", files: list[Path], url: str, wanted: Wanted, as_json: bool) -> int:
    table, num_failed, is_cut = _table(), 0, False
    progress = Progress(console=err, transient=True, disable=len(files) < 2)
    with progress if err.is_terminal else nullcontext():
        task = progress.add_task("classifying", total=len(files))
        for row in _rows(client, files, url, wanted):
            num_failed += "error" in row
            is_cut |= "threshold" in row and len(row["predictions"]) == wanted.top_k
            progress.advance(task)
            if as_json:
                out.out(json.dumps(row), highlight=False)
            else:
                _add(table, row)
    if not as_json:
        out.print(table)
    if is_cut:
        err.print(
            f"a multi-label set: {wanted.top_k} labels an image at most; --top-k N shows more"
        )
    return num_failed


def _rows(
    client: "Client", files: list[Path], url: str, wanted: Wanted
) -> Iterator[ClassifiedFile]:
    """Yield one row per file, in order, a few requests being under way at a time."""
    answers = client.classify_many(
        files, concurrency=CONCURRENCY, top_k=wanted.top_k, threshold=wanted.threshold
    )
    for result in answers:
        told = {"error": _error(result.error, url)} if result.error else result.get().raw
        yield {"file": str(result.path), **told}


def _error(error: "TandemError", url: str) -> dict[str, str]:
    """Return an error as the service tells them, with what to do where nobody answered."""
    message = error.message
    if error.code == "unreachable":
        message += "; is the service running? tandem serve"
        if url.startswith("https:"):
            message += "; does it ask for a certificate? --client-cert"
    told = {"code": error.code, "message": message}
    return told | ({"request_id": error.request_id} if error.request_id else {})


def _table() -> Table:
    table = Table()
    for column in ("file", "label", "probability", "members"):
        is_figure = column == "probability"
        table.add_column(column, no_wrap=is_figure, overflow="fold", min_width=10)
    return table


def _opinion(member: dict[str, Any], threshold: float | None) -> str:
    """Return what a member says: its first choice, or all labels of a multi-label set."""
    if threshold is None:
        return f"{member['label']} {member['probability']:.2f}"
    told = (f"{one['label']} {one['probability']:.2f}" for one in member["predictions"])
    return " + ".join(told) or "nothing"


def _add(table: Table, row: ClassifiedFile) -> None:
    name = escape(row["file"])  # brackets in names and labels are no markup
    if error := row.get("error"):
        table.add_row(name, "[red]failed[/]", "", escape(error["message"]))
        return
    threshold = row.get("threshold")  # of a multi-label set
    members = ", ".join(f"{n} {_opinion(m, threshold)}" for n, m in row["members"].items())
    if skipped := row.get("skipped_members"):  # by the cascade: the first member was sure
        members += f" (sure; not asked: {', '.join(skipped)})"
    if missing := row.get("missing_members"):
        told = ", ".join(f"{name} ({why})" for name, why in missing.items())
        members += f"; degraded, without {told}"
    if not row["predictions"]:
        table.add_row(name, f"no label from {threshold:g} on", "", escape(members))
    for rank, prediction in enumerate(row["predictions"]):
        probability, label = f"{prediction['probability']:.3f}", escape(prediction["label"])
        first = rank == 0
        table.add_row(name if first else "", label, probability, escape(members) if first else "")
