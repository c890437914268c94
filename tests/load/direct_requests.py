"""What it brings to pass Serve's wrapper: ``python tests/load/direct_requests.py PHOTOS``.

Two services, ``direct_requests`` on and off, take turns with 1, 16 and 64 clients. Prints JSON.
"""

import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from machine import ROOT, describe
from on_off import Turns
from result_file import write_result

from app.bench.photos import photos_in

RESULT = ROOT / "tests" / "load" / "results" / "direct_requests.json"


def main(
    photos: Annotated[Path, typer.Argument(help="folder of JPEGs", exists=True)],
    starts: Annotated[int, typer.Option(help="of both services", min=1)] = 3,
    rounds: Annotated[int, typer.Option(help="of each start", min=1)] = 4,
    seconds: Annotated[float, typer.Option(help="of each turn", min=1)] = 3.0,
    json_file: Annotated[Path, typer.Option("--json", help="write the result here")] = RESULT,
) -> None:
    """Measure past Serve's wrapper and through it, in turns."""
    turns = Turns("direct_requests", (1, 16, 64), starts, rounds, seconds)
    result: dict[str, Any] = {"machine": describe(), "starts": starts}
    result |= {"rounds": rounds, "seconds": seconds}
    with tempfile.TemporaryDirectory() as folder:
        result |= turns.compared(photos_in(photos), Path(folder), "imagenette")
    write_result(result, json_file)


if __name__ == "__main__":
    typer.run(main)
