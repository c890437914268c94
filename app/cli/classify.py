"""``tandem classify`` and ``classify-offline``: files, folders and globs, answered as rows.

A service answers the first, the networks in this process or on a cluster's nodes the second.
"""

import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from app.access import sent_key
from app.bench.load import find_files
from app.cli.main import Caller, service_url
from app.graph.request import checked_threshold, checked_top_k
from models.ensemble import PlanName
from tandem_client import Client, RetryPolicy, TandemError

DEFAULT_URL = "http://127.0.0.1:8000"
OFFLINE, OFFLINE_SET = "tandem.offline", "imagenette"
CONCURRENCY = 8  # enough to fill a batch; more only waits in the service's queues
LINE_EVERY_S = 60.0  # between lines of progress in a log
TIMEOUT_S = 60.0  # for each file, all its attempts included
MAX_LISTED = 10  # classes of the summary

out = Console(emoji=False)
err = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False)
ClassifiedFile = dict[str, Any]  # {"file": str, **answer} or {"file": str, "error": {...}}


Paths = Annotated[list[str], typer.Argument(help="files, folders (all images in them), globs")]


@dataclass(frozen=True)
class Shown:
    """What of an answer is shown, and how."""

    top_k: Annotated[int, typer.Option(min=1, help="classes per image, at most")] = 1
    threshold: Annotated[
        float | None,
        typer.Option(help="multi-label sets: the lowest score of a label  (default: the set's)"),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, an object per line")] = False


def classify(
    paths: Paths,
    url: Annotated[str, typer.Option(help="a running service")] = DEFAULT_URL,
    model_set: Annotated[
        str | None, typer.Option(help="which of the service's sets  (default: its first)")
    ] = None,
    plan: Annotated[
        PlanName | None,
        typer.Option(
            help="full asks every member, fast as few as the set's fast plan needs  (default: the "
            "service's setting)"
        ),
    ] = None,
    embedding: Annotated[
        str | None,
        typer.Option(
            help="a member, whose pooled features answers have (with --json)", metavar="MEMBER"
        ),
    ] = None,
    *,
    shown: Shown,
    caller: Caller,
) -> None:
    """Send images to a running service and print their labels; exit code 1 if any failed.

    Without a service: tandem classify-offline, or the same as tandem classify --offline.
    """
    asked = {"model_set": model_set, "plan": plan, "embedding": embedding}
    files = list(find_files(paths))
    with _client(url, caller) as client:
        rows = _rows(
            client, files, url, asked | {"top_k": shown.top_k, "threshold": shown.threshold}
        )
        _end(_run(rows, len(files), shown), len(files))


def classify_offline(
    paths: Paths,
    address: Annotated[
        str | None,
        typer.Option(
            help="on the nodes of a Ray cluster, at auto, HOST:PORT or ray://HOST:10001; PATHS are "
            "folders that all nodes see, or s3:// and gs:// URLs"
        ),
    ] = None,
    model_set: Annotated[str, typer.Option(help="a set's name, or its folder")] = OFFLINE_SET,
    plan: Annotated[
        PlanName,
        typer.Option(help="full asks every member, fast as few as the set's fast plan needs"),
    ] = "full",
    embedding: Annotated[
        str | None,
        typer.Option(
            help="a member, whose pooled features answers have (with --json or --out)",
            metavar="MEMBER",
        ),
    ] = None,
    out_file: Annotated[
        str | None,
        typer.Option(
            "--out",
            help="keep the answers in FILE.jsonl, or as Parquet files in a folder FILE.parquet or "
            "s3://BUCKET/FOLDER; the same command goes on where it was stopped",
        ),
    ] = None,
    *,
    shown: Shown,
) -> None:
    """Classify images without a service, on all cores; exit code 1 if any failed.

    It answers and prints as tandem classify does.
    """
    (entry,) = entry_points(group=OFFLINE, name="run")  # app never imports calibration
    asked: dict[str, Any] = {"top_k": shown.top_k, "threshold": shown.threshold, "plan": plan}
    if embedding is not None:
        asked["embedding"] = embedding
    with (
        _source(address, paths, (model_set, plan, embedding)) as (source, files),
        entry.load()(source, out_file, paths, asked) as run,
    ):
        checked_top_k(shown.top_k, source.manifest.num_classes)
        is_multi_label = source.manifest.task == "multi_label"
        checked_threshold(shown.threshold, is_multi_label=is_multi_label)
        left = run.left(files)
        rows = run.rows(left, shown.top_k, shown.threshold)
        started = time.perf_counter()
        num_failed = _run(rows, len(left), shown, is_kept=out_file is not None)
    if out_file is not None:
        rate = len(left) / (time.perf_counter() - started)  # the networks were ready before
        num_failed += _kept(run, out_file, files, len(left), rate)
    _end(num_failed, len(files))


def _kept(run: Any, out_file: str, files: list[str], num_new: int, rate: float) -> int:
    """Print where the answers are; return how many of an earlier run's are errors."""
    before = f", {len(files) - num_new} before" if num_new < len(files) else ""
    place = escape(out_file)
    err.print(f"{num_new} images classified{before}: {place} ({rate:.1f} images/s)")
    failed: int = run.num_failed_before(files)
    if failed:
        err.print(
            f"{failed} rows of an earlier run are errors; remove them from {place}, and the "
            "same command classifies these files again"
        )
    return failed


def _end(num_failed: int, num_files: int) -> None:
    """End the command with exit code 1 if files failed."""
    if num_failed:
        err.print(f"[red]{num_failed} of {num_files} failed[/]")
        raise typer.Exit(1)


def _client(url: str, caller: Caller) -> Client:
    # It does not retry if nothing listens at the address: that would take time for every file.
    policy = RetryPolicy(on=frozenset({"overloaded", "not_ready", "reset"}))
    key, tls = sent_key(caller.key_file), caller.tls.context()
    return Client(service_url(url), api_key=key, timeout=TIMEOUT_S, retry=policy, tls=tls)


@contextmanager
def _source(
    address: str | None, paths: list[str], asked: tuple[str, PlanName, str | None]
) -> Iterator[tuple[Any, list[str]]]:
    """Give what classifies, this process or a cluster, and the names of the files.

    ``asked`` is the model set, the plan and the member of the embedding.
    """
    if address is None:
        files = list(map(str, find_files(paths)))
        (entry,) = entry_points(group=OFFLINE, name="rows")
        model_set, plan, embedding = asked
        yield entry.load()(model_set, plan=plan, embedding=embedding), files
    else:
        from app.cli.cluster_rows import ClusterRows
        from app.launch.ray_cluster import joined_ray

        with joined_ray(address, may_be_client=True):
            cluster = ClusterRows(*asked)
            yield cluster, cluster.find(paths)


def _run(
    rows: Iterator[ClassifiedFile], num_files: int, shown: Shown, *, is_kept: bool = False
) -> int:
    """Print the rows, or only count them if they are kept in a file; return how many failed."""
    lines, num_failed, is_cut, reported = list[_Line](), 0, False, time.monotonic()
    by_class, num_unsure = Counter[str](), 0
    progress = Progress(console=err, transient=True, disable=num_files < 2)
    with progress if err.is_terminal else nullcontext():
        task = progress.add_task("classifying", total=num_files)
        for number, row in enumerate(rows, start=1):
            num_failed += "error" in row
            is_cut |= "threshold" in row and len(row["predictions"]) == shown.top_k
            num_unsure += row.get("sure") is False
            by_class.update(p["label"] for p in row.get("predictions", [])[: _num_counted(row)])
            progress.advance(task)
            if shown.as_json:
                out.out(json.dumps(row), highlight=False)
            elif not is_kept:
                lines += _lines(row)
            if not err.is_terminal and time.monotonic() - reported >= LINE_EVERY_S:
                reported = time.monotonic()  # a log, which has no bar, gets a line a minute
                err.print(f"{number} of {num_files} classified")
    if not (is_kept or shown.as_json):
        out.print(_table(lines))
    if num_files > 1 and by_class and not shown.as_json:
        err.print(escape(_summary(by_class, num_unsure)))
    if is_cut:
        err.print(
            f"a multi-label set: at most {shown.top_k} labels per image; --top-k N shows more"
        )
    return num_failed


def _num_counted(row: ClassifiedFile) -> int:
    """Return how many labels of an answer the summary counts: all of a multi-label set's."""
    return len(row["predictions"]) if "threshold" in row else 1


def _summary(by_class: "Counter[str]", num_unsure: int) -> str:
    """Return how many images each class has, and of how many the set is not sure."""
    listed = by_class.most_common(MAX_LISTED)
    classes = [f"{label} {count}" for label, count in listed]
    if more := len(by_class) - len(listed):
        classes.append(f"{more} more classes")
    return ", ".join(classes) + (f"; not sure of {num_unsure}" if num_unsure else "")


def _rows(
    client: Client, files: list[Path], url: str, asked: dict[str, Any]
) -> Iterator[ClassifiedFile]:
    """Yield a row per file, in order, with a few requests under way at a time."""
    for result in client.classify_many(files, concurrency=CONCURRENCY, **asked):
        outcome = {"error": _error(result.error, url)} if result.error else result.get().raw
        yield {"file": str(result.path), **outcome}


def _error(error: TandemError, url: str) -> dict[str, str]:
    message = error.message
    if error.code == "unreachable":
        message += "; is the service running? tandem serve"
        if url.startswith("https:"):
            message += "; does it ask for a certificate? --client-cert"
    fields = {"code": error.code, "message": message}
    return fields | ({"request_id": error.request_id} if error.request_id else {})


def _table(lines: "list[_Line]") -> Table:
    """Return the table; the members' column is left out if it would be empty."""
    table, has_members = Table(), any(line.members for line in lines)
    for column in ("file", "label", "probability", "members\nthat disagree")[: 3 + has_members]:
        is_figure = column == "probability"
        table.add_column(column, no_wrap=is_figure, overflow="fold", min_width=10)
    for line in lines:
        table.add_row(*line[: 3 + has_members])
    return table


class _Line(NamedTuple):
    """A line of the table, in which brackets in names and labels are escaped."""

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
    """Yield notes on members that disagree, were not asked, or did not answer."""
    if differing := _differing(row):
        yield ", ".join(f"{name} {opinion}" for name, opinion in differing.items())
    if skipped := row.get("skipped_members"):  # by the fast plan
        yield f"{', '.join(row['members'])} was likely enough; not asked: {', '.join(skipped)}"
    if missing := row.get("missing_members"):
        why = ", ".join(f"{name} ({reason})" for name, reason in missing.items())
        yield f"degraded, without {why}"


def _differing(row: ClassifiedFile) -> dict[str, str]:
    """Return the labels of members that differ from the table's.

    For a multi-label set, all members' labels if any two differ: the table may show fewer labels.
    """
    if row["agreement"]:
        return {}
    members = row["members"].items()
    if "threshold" in row:
        listed = {name: map(_opinion, member["predictions"]) for name, member in members}
        return {name: " + ".join(opinions) or "nothing" for name, opinions in listed.items()}
    first = row["predictions"][0]["label"]
    return {name: _opinion(member) for name, member in members if member["label"] != first}


def _opinion(said: dict[str, Any]) -> str:
    return f"{said['label']} {said['probability']:.2f}"
