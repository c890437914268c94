"""Fuzzes manifests, images and networks: ``python tests/load/fuzz.py``; exit code 1 at a traceback.

Every mutation must end in a right answer or an error of ours, within two seconds of CPU time. The
seed of the one that does not is printed.
"""

import os
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer
from result_file import write_result

from tests.support.fuzzing import Attempt, ImageFuzz, ManifestFuzz, MetadataFuzz, run
from tests.support.onnx_fuzz import OnnxFuzz


def main(
    mutations: Annotated[int, typer.Option(min=1, help="of each kind")] = 100_000,
    seconds: Annotated[float, typer.Option(help="of each kind, at most")] = 3600,
    seed: Annotated[int, typer.Option(help="the same seed, the same mutations")] = 917524,
    only: Annotated[str | None, typer.Option(help="manifests, images, metadata or onnx")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the result here")] = None,
) -> None:
    """Try mutations of each kind and count what became of them."""
    _silence_decoders()
    with tempfile.TemporaryDirectory() as folder, closing(OnnxFuzz(Path(folder))) as onnx:
        kinds: dict[str, Attempt] = {
            "manifests": ManifestFuzz(Path(folder)),
            "images": ImageFuzz(),
            "metadata": MetadataFuzz(),
            "onnx": onnx,
        }
        result = {
            name: _counted(attempt, mutations, seed, seconds)
            for name, attempt in kinds.items()
            if only in (None, name)
        }
    write_result({"seed": seed, **result}, json_file)


def _counted(attempt: Attempt, mutations: int, seed: int, seconds: float) -> dict[str, float]:
    started = time.monotonic()
    try:
        outcomes = run(attempt, mutations, seed, seconds)
    except AssertionError as error:
        typer.echo(error, err=True)
        raise typer.Exit(1) from error
    spent_s = round(time.monotonic() - started, 1)
    return {"mutations": outcomes.total(), "seconds": spent_s, **dict(sorted(outcomes.items()))}


def _silence_decoders() -> None:
    """Keep libjpeg's and libpng's remarks on damaged files, not ours, off the terminal."""
    ours = os.dup(2)
    sys.stderr = os.fdopen(ours, "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


if __name__ == "__main__":
    typer.run(main)
