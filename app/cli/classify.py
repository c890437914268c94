"""``tandem classify``: sends files, folders and globs to a running service."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from app.cli.options import ClientCert, ClientKey, KeyFile, Roots
from models.api_keys import key_headers
from models.client_tls import ClientTls
from models.image_files import find_files

DEFAULT_URL = "http://127.0.0.1:8000"
CONCURRENCY = 8  # enough to fill a batch; more only waits in the service's queues

out, err = Console(), Console(stderr=True, soft_wrap=True, highlight=False)
ClassifiedFile = dict[str, Any]  # {"file": str, **answer} or {"file": str, "error": {...}}


def classify(
    paths: Annotated[list[str], typer.Argument(help="files, folders (all images in them), globs")],
    url: Annotated[str, typer.Option(help="a running service")] = DEFAULT_URL,
    top_k: Annotated[int, typer.Option(min=1, help="classes per image")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object per line")] = False,
    key_file: KeyFile = None,
    ca: Roots = None,
    client_cert: ClientCert = None,
    client_key: ClientKey = None,
) -> None:
    """Send images to a running service and print their labels; exit code 1 if any failed."""
    files, tls = list(find_files(paths)), ClientTls(ca, client_cert, client_key)
    client = httpx.AsyncClient(
        timeout=60, headers=key_headers(key_file), verify=tls.context() or True
    )
    num_failed = asyncio.run(_run(client, files, url.rstrip("/"), top_k, as_json))
    if num_failed:
        err.print(f"[red]{num_failed} of {len(files)} failed[/]")
        raise typer.Exit(1)


async def _run(
    client: httpx.AsyncClient, files: list[Path], url: str, top_k: int, as_json: bool
) -> int:
    table, num_failed = _table(), 0
    progress = Progress(console=err, transient=True, disable=len(files) < 2)
    async with client:
        with progress if err.is_terminal else nullcontext():
            task = progress.add_task("classifying", total=len(files))
            async for row in _answers(client, files, url, top_k):
                num_failed += "error" in row
                progress.advance(task)
                if as_json:
                    out.out(json.dumps(row), highlight=False)
                else:
                    _add(table, row)
    if not as_json:
        out.print(table)
    return num_failed


async def _answers(
    client: httpx.AsyncClient, files: list[Path], url: str, top_k: int
) -> AsyncIterator[ClassifiedFile]:
    """Yield one row per file, in order, a few requests being under way at a time."""
    slots = asyncio.Semaphore(CONCURRENCY)

    async def ask(file: Path) -> ClassifiedFile:
        async with slots:
            return {"file": str(file), **await _ask(client, file, url, top_k)}

    tasks = [asyncio.create_task(ask(file)) for file in files]
    try:
        for task in tasks:
            yield await task
    finally:
        for task in tasks:
            task.cancel()


async def _ask(client: httpx.AsyncClient, file: Path, url: str, top_k: int) -> ClassifiedFile:
    try:
        data = await asyncio.to_thread(file.read_bytes)
    except OSError as error:
        return _error("unreadable", f"cannot read the file: {error.strerror}")
    try:
        answer = await client.post(f"{url}/v1/classify", params={"top_k": top_k}, content=data)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        asked = "; does it ask for a certificate? --client-cert" if url[:6] == "https:" else ""
        return _error(
            "unreachable",
            f"no answer from {url} ({type(error).__name__}); is the service running? tandem serve"
            + asked,
        )
    try:
        row = answer.json()
    except ValueError:
        row = None
    if not _is_ours(row):
        return _error("bad_answer", f"{url} answered {answer.status_code}, but not as Tandem does")
    return dict(row)


def _is_ours(row: Any) -> bool:
    return isinstance(row, dict) and ("predictions" in row or isinstance(row.get("error"), dict))


def _error(code: str, message: str) -> ClassifiedFile:
    return {"error": {"code": code, "message": message}}


def _table() -> Table:
    table = Table()
    for column in ("file", "label", "probability", "members"):
        is_figure = column == "probability"
        table.add_column(column, no_wrap=is_figure, overflow="fold", min_width=10)
    return table


def _add(table: Table, row: ClassifiedFile) -> None:
    name = escape(row["file"])  # brackets in names and labels are no markup
    if error := row.get("error"):
        table.add_row(name, "[red]failed[/]", "", escape(error["message"]))
        return
    members = ", ".join(
        f"{n} {m['label']} {m['probability']:.2f}" for n, m in row["members"].items()
    )
    if skipped := row.get("skipped_members"):  # by the cascade: the first member was sure
        members += f" (sure; not asked: {', '.join(skipped)})"
    if missing := row.get("missing_members"):
        told = ", ".join(f"{name} ({why})" for name, why in missing.items())
        members += f"; degraded, without {told}"
    for rank, prediction in enumerate(row["predictions"]):
        probability, label = f"{prediction['probability']:.3f}", escape(prediction["label"])
        first = rank == 0
        table.add_row(name if first else "", label, probability, escape(members) if first else "")
