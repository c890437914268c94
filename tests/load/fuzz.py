"""Fuzzes manifests, images and networks: ``python tests/load/fuzz.py``; exit code 1 at a traceback.

Every mutation must end in a right answer or an error of ours, within two seconds of CPU time. The
seed of the one that does not is printed. A run of many hours can be had in parts:
``--only onnx --processes 2 --seconds 230 --json FILE`` goes on where the run that wrote FILE ended,
and adds to its counts. After a change of the code it begins anew, with ``--first`` where an earlier
commit's run has ended.
"""

import json
import os
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import typer
from machine import describe
from result_file import write_result

from tests.support.fuzzing import Attempt, ImageFuzz, ManifestFuzz, MetadataFuzz, run
from tests.support.onnx_fuzz import OnnxFuzz

KINDS: dict[str, Callable[[Path], Attempt]] = {
    "manifests": ManifestFuzz,
    "images": lambda _: ImageFuzz(),
    "metadata": lambda _: MetadataFuzz(),
    "onnx": OnnxFuzz,
}
SPAWN = get_context("spawn")
PART = 50  # mutations that a process is asked for at a time
_attempts: list[Attempt] = []  # the process's own


def main(
    mutations: Annotated[int, typer.Option(min=1, help="of each kind")] = 100_000,
    first: Annotated[int, typer.Option(min=0, help="the number of the first to try")] = 0,
    seconds: Annotated[float, typer.Option(help="of each kind, at most")] = 3600,
    seed: Annotated[int, typer.Option(help="the same seed, the same mutations")] = 917524,
    only: Annotated[str | None, typer.Option(help="manifests, images, metadata or onnx")] = None,
    processes: Annotated[int, typer.Option(min=1, help="that share the mutations")] = 1,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="write the result here, and go on from one")
    ] = None,
) -> None:
    """Try mutations of each kind and count what became of them."""
    result = _earlier(json_file, seed, first)
    for kind in KINDS:
        if only in (None, kind):
            before = result.get(kind, {})
            numbers = range(first, mutations)
            result[kind] = _counted(kind, before, numbers, seed, seconds, processes)
    write_result(result, json_file)


def _earlier(json_file: Path | None, seed: int, first: int) -> dict[str, Any]:
    """Return what a run of this commit with the same numbers counted; and what this machine is."""
    result = json.loads(json_file.read_text("utf-8")) if json_file and json_file.exists() else {}
    now = describe() | {"seed": seed, "first": first}
    is_same = all(result.get(key, 0) == now[key] for key in ("seed", "first", "commit"))
    return {**(result if is_same else {}), **now}


def _counted(
    kind: str, before: dict[str, Any], numbers: range, seed: int, seconds: float, processes: int
) -> dict[str, Any]:
    """Go on with the mutations of a kind to the last number, or until its seconds are over."""
    outcomes = Counter(before.get("outcomes", {}))
    started = time.monotonic()
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            ProcessPoolExecutor(processes, SPAWN, _begin, (kind, Path(folder))) as pool,
        ):
            left = numbers[outcomes.total() :]
            parts = _parts(left.start, left.stop, started + seconds)
            for outcome in _in_order(pool, seed, parts, 2 * processes):
                outcomes += outcome
    except AssertionError as error:
        typer.echo(error, err=True)
        raise typer.Exit(1) from error
    return {
        "mutations": outcomes.total(),
        "seconds": round(time.monotonic() - started + before.get("seconds", 0), 1),
        "outcomes": dict(sorted(outcomes.items())),
    }


def _parts(first: int, end: int, until_s: float) -> Iterator[tuple[int, int]]:
    """Yield (first, number) of mutations, as long as there is time."""
    while first < end and time.monotonic() < until_s:
        yield first, min(PART, end - first)
        first += PART


def _in_order(
    pool: ProcessPoolExecutor, seed: int, parts: Iterator[tuple[int, int]], ahead: int
) -> Iterator[Counter[str]]:
    """Yield what became of each part; as many as ``ahead`` are asked for before they are taken."""
    asked: deque[Future[Counter[str]]] = deque()
    for first, num in parts:
        asked.append(pool.submit(_tried, seed, first, num))
        if len(asked) == ahead:
            yield asked.popleft().result()
    while asked:
        yield asked.popleft().result()


def _begin(kind: str, folder: Path) -> None:
    _silence_decoders()
    _attempts.append(KINDS[kind](Path(tempfile.mkdtemp(dir=folder))))


def _tried(seed: int, first: int, num: int) -> Counter[str]:
    return run(_attempts[0], num, seed, first=first)


def _silence_decoders() -> None:
    """Keep libjpeg's and libpng's remarks on damaged files, not ours, off the terminal."""
    ours = os.dup(2)
    sys.stderr = os.fdopen(ours, "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


if __name__ == "__main__":
    typer.run(main)
