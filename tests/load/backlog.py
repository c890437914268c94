"""What the larger batches of a backlog bring: ``python tests/load/backlog.py PHOTOS``.

Two services, ``backlog_batches`` on and off, take turns: 16 clients, who leave no backlog, and 64,
who do; with the bundled networks at 128 px, and with the same networks at 224 px. Prints JSON.
"""

import tempfile
from pathlib import Path

import typer
from larger_set import write_larger_set
from machine import ROOT
from on_off import Photos, Result, Rounds, Seconds, Starts, Turns
from result_file import write_result

from app.bench.load import photos_in

SIZES_PX = (128, 224)  # the bundled networks' own; that of most networks of ImageNet
RESULT = ROOT / "tests" / "load" / "results" / "backlog.json"


def main(
    photos: Photos,
    starts: Starts = 4,
    rounds: Rounds = 2,
    seconds: Seconds = 4.0,
    json_file: Result = RESULT,
) -> None:
    """Measure with and without larger batches, in turns."""
    bodies = photos_in(photos)
    turns = Turns("backlog_batches", (16, 64), starts, rounds, seconds)
    result = turns.facts()
    with tempfile.TemporaryDirectory() as folder:
        sets = {128: "imagenette", 224: str(write_larger_set(Path(folder) / "set224", 224))}
        for size in SIZES_PX:
            result[f"{size}_px"] = turns.compared(bodies, Path(folder), sets[size])
    write_result(result, json_file)


if __name__ == "__main__":
    typer.run(main)
