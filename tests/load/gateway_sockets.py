"""What it brings that HAProxy comes by a socket: ``python tests/load/gateway_sockets.py PHOTOS``.

Two services, whose HAProxy reaches the Gateway at a Unix-domain socket and by TCP on loopback, take
turns with 1, 16 and 64 clients: with the bundled networks, and with networks that cost nothing
(:mod:`null_set`). Prints JSON.
"""

import tempfile
from pathlib import Path

import typer
from machine import ROOT
from null_set import small_photos, write_null_set
from on_off import Photos, Result, Rounds, Seconds, Starts, Turns
from result_file import write_result

from app.bench.photos import photos_in
from app.environment import GATEWAY_SOCKETS, SOCKETS_OFF

RESULT = ROOT / "tests" / "load" / "results" / "gateway_sockets.json"


def main(
    photos: Photos,
    starts: Starts = 2,
    rounds: Rounds = 4,
    seconds: Seconds = 3.0,
    json_file: Result = RESULT,
) -> None:
    """Measure by sockets and by TCP, in turns."""
    turns = Turns(GATEWAY_SOCKETS, (1, 16, 64), starts, rounds, seconds, (None, SOCKETS_OFF))
    result = turns.facts()
    with tempfile.TemporaryDirectory() as folder:
        bodies, null = photos_in(photos), write_null_set(Path(folder) / "null")
        result["bundled"] = turns.compared(bodies, Path(folder), "imagenette")
        result["null"] = turns.compared(small_photos(bodies), Path(folder), str(null))
    write_result(result, json_file)


if __name__ == "__main__":
    typer.run(main)
