"""The files of ``app/`` that one POST runs through: ``python tests/load/request_files.py``.

One photo through the HTTP interface in this process, with every stage in it, untraced. Prints JSON:
the files by package, and how often the call stack entered each package anew (a measure of how often
a reader changes rooms).
"""

import asyncio
import json
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType

import httpx
import machine  # noqa: F401 (makes the project importable)
import typer
from fastapi import FastAPI

from app.bench.load import drawn_photos
from app.http.api import create_api
from app.serve.gateway import assemble
from app.settings import Settings

APP = Path(__file__).parents[2] / "app"


class Recorder:
    """Hears of every call of a Python function, on every thread."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.entered: Counter[str] = Counter()
        self._last: dict[int, str] = {}  # the package that each thread was in last

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event != "call" or APP not in path.parents:
            return
        file = str(path.relative_to(APP))
        package = file.rpartition("/")[0] or "."
        self.files.add(file)
        thread = threading.get_ident()
        if self._last.get(thread) != package:
            self._last[thread] = package
            self.entered[package] += 1


def main() -> None:
    """Send one photo and print what ran."""
    recorder = Recorder()
    threading.setprofile(recorder)  # before the stages start their threads
    api = create_api(assemble(Settings(trace_exporter="none")).service)
    asyncio.run(_post(api, recorder))
    by_package: dict[str, list[str]] = {}
    for file in sorted(recorder.files):
        package, _, name = file.rpartition("/")
        by_package.setdefault(package or ".", []).append(name)
    result = {
        "num_files": len(recorder.files),
        "files": by_package,
        "entered": dict(recorder.entered.most_common()),
    }
    typer.echo(json.dumps(result, indent=2))


async def _post(api: FastAPI, recorder: Recorder) -> None:
    (photo, *_) = drawn_photos(1)
    transport = httpx.ASGITransport(api)
    async with httpx.AsyncClient(transport=transport, base_url="http://tandem") as client:
        (await client.post("/v1/classify", content=photo)).raise_for_status()  # what is lazy
        recorder.files.clear()
        recorder.entered.clear()
        sys.setprofile(recorder)
        answer = await client.post("/v1/classify", content=photo)
        sys.setprofile(None)
        answer.raise_for_status()


if __name__ == "__main__":
    typer.run(main)
