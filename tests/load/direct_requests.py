"""What it brings to pass Serve's wrapper: ``python tests/load/direct_requests.py PHOTOS``.

Two services, ``direct_requests`` on and off, take turns with 1, 16 and 64 clients. Prints JSON.
"""

import tempfile
from pathlib import Path

import typer
from machine import ROOT
from on_off import Photos, Result, Rounds, Seconds, Starts, Turns
from result_file import write_result

from app.bench.load import photos_in

RESULT = ROOT / "tests" / "load" / "results" / "direct_requests.json"


def main(
    photos: Photos,
    starts: Starts = 3,
    rounds: Rounds = 4,
    seconds: Seconds = 3.0,
    json_file: Result = RESULT,
) -> None:
    """Measure past Serve's wrapper and through it, in turns."""
    turns = Turns("direct_requests", (1, 16, 64), starts, rounds, seconds)
    result = turns.facts()
    with tempfile.TemporaryDirectory() as folder:
        result |= turns.compared(photos_in(photos), Path(folder), "imagenette")
    write_result(result, json_file)


if __name__ == "__main__":
    typer.run(main)
