"""``tandem classify``: sends files, folders and globs to a running service."""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from app.access.api_keys import sent_key
from app.access.client_tls import ClientTls
from app.cli.options import CallersKeyFile, ClientCert, ClientKey, Roots
from app.errors import ConfigError
from app.graph.parameters import checked_threshold, checked_top_k

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
    offline: Annotated[
        bool, typer.Option("--offline", help="in this process, on every core, without a service")
    ] = False,
    model_set: Annotated[
        str, typer.Option(help="with --offline: a model set's name, or its folder")
    ] = "imagenette",
    out_file: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="with --offline: keep the answers in FILE.jsonl, or a folder FILE.parquet; the "
            "same command goes on where it was stopped",
        ),
    ] = None,
    key_file: CallersKeyFile = None,
    ca: Roots = None,
    client_cert: ClientCert = None,
    client_key: ClientKey = None,
) -> None:
    """Send images to a running service and print their labels; exit code 1 if any failed."""
    from app.bench.load import find_files

    files, wanted = list(find_files(paths)), Wanted(top_k, threshold)
    if offline:
        num_failed = _offline(files, model_set, out_file, wanted, as_json)
    elif out_file is not None:
        raise ConfigError("--out goes with --offline; a service's answers: --json > FILE.jsonl")
    else:
        tls = ClientTls(ca, client_cert, client_key)
        with _client(url, sent_key(key_file), tls) as client:
            rows = _rows(client, files, url, wanted)
            num_failed = _run(rows, len(files), wanted, as_json)
    if num_failed:
        err.print(f"[red]{num_failed} of {len(files)} failed[/]")
        raise typer.Exit(1)


def _offline(
    files: list[Path], model_set: str, out_file: Path | None, wanted: Wanted, as_json: bool
) -> int:
    """Classify in this process; return how many files failed."""
    (entry,) = entry_points(group="tandem.offline", name="run")  # app never imports calibration
    with entry.load()(model_set, out_file) as run:
        checked_top_k(wanted.top_k, run.manifest.num_classes)
        is_multi_label = run.manifest.task == "multi_label"
        checked_threshold(wanted.threshold, is_multi_label=is_multi_label)
        left = run.left(files)
        rows = run.rows(left, wanted.top_k, wanted.threshold)
        num_failed = _run(rows, len(left), wanted, as_json, is_shown=out_file is None)
    if out_file is not None:
        before = f", {len(files) - len(left)} before" if len(left) < len(files) else ""
        err.print(f"{len(left)} images classified{before}: {out_file}")
    return num_failed


def _client(url: str, api_key: str | None, tls: ClientTls) -> "Client":
    """Return a client that tries again what was refused or cut off.

    Not what nobody listens to: that would take its time for each of a thousand files.
    """
    from tandem_client import Client, RetryPolicy

    policy = RetryPolicy(on=frozenset({"overloaded", "not_ready", "reset"}))
    return Client(url, api_key=api_key, timeout=TIMEOUT_S, retry=policy, tls=tls.context())


def _run(
    rows: Iterator[ClassifiedFile],
    num_files: int,
    wanted: Wanted,
    as_json: bool,
    *,
    is_shown: bool = True,
) -> int:
    lines, num_failed, is_cut = list[_Line](), 0, False
    progress = Progress(console=err, transient=True, disable=num_files < 2)
    with progress if err.is_terminal else nullcontext():
        task = progress.add_task("classifying", total=num_files)
        for row in rows:
            num_failed += "error" in row
            is_cut |= "threshold" in row and len(row["predictions"]) == wanted.top_k
            progress.advance(task)
            if as_json:
                out.out(json.dumps(row), highlight=False)
            elif is_shown:
                lines += _lines(row)
    if is_shown and not as_json:
        out.print(_table(lines))
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


def _table(lines: "list[_Line]") -> Table:
    """Return the table; without the members' column where no line says anything of them."""
    table, has_members = Table(), any(line.members for line in lines)
    for column in ("file", "label", "probability", "members\nthat disagree")[: 3 + has_members]:
        is_figure = column == "probability"
        table.add_column(column, no_wrap=is_figure, overflow="fold", min_width=10)
    for line in lines:
        table.add_row(*line[: 3 + has_members])
    return table


class _Line(NamedTuple):
    """A line of the table; brackets in names and labels are no markup."""

    file: str
    label: str
    probability: str
    members: str


def _lines(row: ClassifiedFile) -> list[_Line]:
    name = escape(row["file"])
    if error := row.get("error"):
        return [_Line(name, f"[red]failed:[/] {escape(error['message'])}", "", "")]
    members = escape("; ".join(_notes(row)))
    if not row["predictions"]:
        return [_Line(name, f"no label from {row['threshold']:g} on", "", members)]
    lines = [
        _Line("", escape(prediction["label"]), f"{prediction['probability']:.3f}", "")
        for prediction in row["predictions"]
    ]
    label = f"[yellow]not sure:[/] {lines[0].label}" if row.get("sure") is False else lines[0].label
    return [lines[0]._replace(file=name, label=label, members=members), *lines[1:]]


def _notes(row: ClassifiedFile) -> Iterator[str]:
    """Yield who disagrees with the ensemble, and who was not asked or did not answer."""
    if differing := _differing(row):
        yield ", ".join(f"{name} {opinion}" for name, opinion in differing.items())
    if skipped := row.get("skipped_members"):  # by the cascade: the first member was sure
        yield f"{', '.join(row['members'])} was sure; not asked: {', '.join(skipped)}"
    if missing := row.get("missing_members"):
        why = ", ".join(f"{name} ({reason})" for name, reason in missing.items())
        yield f"degraded, without {why}"


def _differing(row: ClassifiedFile) -> dict[str, str]:
    """Return what members say that the table's labels do not.

    Of a multi-label set all say their labels where any two differ: the table may show fewer.
    """
    if row["agreement"]:
        return {}
    if "threshold" in row:
        return {name: _all_labels(member) for name, member in row["members"].items()}
    first = row["predictions"][0]["label"]
    return {
        name: f"{member['label']} {member['probability']:.2f}"
        for name, member in row["members"].items()
        if member["label"] != first
    }


def _all_labels(member: dict[str, Any]) -> str:
    texts = (f"{label['label']} {label['probability']:.2f}" for label in member["predictions"])
    return " + ".join(texts) or "nothing"
