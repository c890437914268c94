"""What processes that decode bring: ``python tests/load/decode_processes.py PHOTOS``.

Two services, ``decode_processes`` as shipped and 0, take turns with 1, 16 and 64 clients: with the
bundled networks, and with networks that cost nothing (:mod:`null_set`). Prints JSON.
"""

import typer
from machine import ROOT
from on_off import Photos, Result, Rounds, Seconds, Starts, Turns
from result_file import write_result

RESULT = ROOT / "tests" / "load" / "results" / "decode_processes.json"


def main(
    photos: Photos,
    starts: Starts = 2,
    rounds: Rounds = 4,
    seconds: Seconds = 3.0,
    json_file: Result = RESULT,
) -> None:
    """Measure with decoding processes and without, in turns."""
    turns = Turns("decode_processes", (1, 16, 64), starts, rounds, seconds, (None, 0))
    write_result(turns.facts() | turns.with_both_sets(photos), json_file)


if __name__ == "__main__":
    typer.run(main)
