"""Where one warm, untraced POST goes in app and models: ``python tests/load/request_files.py``.

One photo through the HTTP interface in this process, with every stage in it. Prints JSON: the files
of each folder that it runs through, Python calls in them, and changes of file (how often a call on
some thread is in another file than the one before it). ``--hops`` lists the calls instead, ``->``
where the file changes.
"""

import asyncio
import json
import sys
import threading
from dataclasses import dataclass
from types import FrameType
from typing import Annotated, Any

import httpx
import machine  # makes the project importable
import typer

from app.bench.load import drawn_photos
from app.http.api import create_api
from app.serve.gateway import assemble
from app.settings import Settings

FOLDERS = tuple(str(machine.ROOT / name) + "/" for name in ("app", "models"))
NUM_WARM = 2  # requests before: what is made once, is


@dataclass(frozen=True)
class Call:
    thread: str
    file: str  # from the project's root
    line: int
    function: str
    is_hop: bool  # the call before it, on its thread, was in another file


class Recorder:
    """Hears of every call of a Python function, on every thread that started after it was set."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.is_on = False
        self._last: dict[str, str] = {}  # the file that each thread was in last

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if not self.is_on or event != "call" or not code.co_filename.startswith(FOLDERS):
            return
        thread, file = (
            threading.current_thread().name,
            code.co_filename[len(str(machine.ROOT)) + 1 :],
        )
        is_hop = self._last.get(thread) != file
        self._last[thread] = file
        self.calls.append(Call(thread, file, frame.f_lineno, code.co_qualname, is_hop))


def recorded(settings: Settings, photo: bytes) -> list[Call]:
    """Return the calls of one POST of the photo to a service of its own, after some before it."""
    recorder = Recorder()
    threading.setprofile(recorder)  # before the stages start their threads
    api = create_api(assemble(settings).service)
    asyncio.run(_post(httpx.ASGITransport(api), photo, recorder))
    threading.setprofile(None)
    return recorder.calls


async def _post(transport: httpx.ASGITransport, photo: bytes, recorder: Recorder) -> None:
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for _ in range(NUM_WARM):
            (await client.post("/v1/classify", content=photo)).raise_for_status()
        sys.setprofile(recorder)
        recorder.is_on = True
        answer = await client.post("/v1/classify", content=photo)
        recorder.is_on = False
        sys.setprofile(None)
        answer.raise_for_status()


def counted(calls: list[Call]) -> dict[str, Any]:
    """Return what is printed of the calls."""
    files = sorted({call.file for call in calls})
    folders = {
        folder: [f for f in files if f.startswith(f"{folder}/")] for folder in ("app", "models")
    }
    return {
        "num_files": {folder: len(names) for folder, names in folders.items()},
        "num_changes_of_file": sum(call.is_hop for call in calls),
        "num_calls": len(calls),
        "files": folders,
    }


def main(
    hops: Annotated[bool, typer.Option("--hops", help="list the calls, in order")] = False,
    model_set: Annotated[str, typer.Option(help="name or folder of the set")] = "imagenette",
) -> None:
    """Send one photo and print what ran."""
    (photo,) = drawn_photos(1)
    settings = Settings(trace_exporter="none", model_set=model_set)
    calls = recorded(settings, photo)
    if not hops:
        typer.echo(json.dumps(counted(calls), indent=2))
    for call in calls if hops else ():
        mark = "->" if call.is_hop else "  "
        typer.echo(f"{call.thread[:12]:12} {mark} {call.file}:{call.line} {call.function}")


if __name__ == "__main__":
    typer.run(main)
