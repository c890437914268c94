"""What it brings that HAProxy comes by a socket: ``python tests/load/gateway_sockets.py PHOTOS``.

Two services, whose HAProxy reaches the Gateway at a Unix-domain socket and by TCP on loopback, take
turns with 1, 16 and 64 clients: with the bundled networks, and with networks that cost nothing
(:mod:`null_set`). Prints JSON.
"""

import typer
from machine import ROOT
from on_off import Photos, Result, Rounds, Seconds, Starts, Turns
from result_file import write_result

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
    write_result(turns.facts() | turns.with_both_sets(photos), json_file)


if __name__ == "__main__":
    typer.run(main)
