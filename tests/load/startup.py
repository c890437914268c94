"""How long until ready, how much memory and CPU when idle: ``python tests/load/startup.py``.

Prints JSON; ``--json FILE`` writes it as well. The first start has an empty compile cache, which it
fills; the others are what a user sees on a machine that is set up.
"""

import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from machine import cpu_seconds, describe, process_tree, pss_mb, write_result
from running import TANDEM, running

from app.bench.load import Load, Target, drawn_photos, run_load

LOAD_S = 10.0


def main(
    rounds: Annotated[int, typer.Option(help="starts that count", min=1)] = 3,
    idle_s: Annotated[float, typer.Option(help="seconds watched when idle", min=1)] = 20.0,
    config: Annotated[Path | None, typer.Option(help="of the service")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the result here")] = None,
) -> None:
    """Start the service several times; measure each start, then memory and CPU."""
    command = [TANDEM, "serve", *(("--config", str(config)) if config else ())]
    with TemporaryDirectory() as cache:
        starts = [
            _one(command, cache, idle_s if index == rounds else 0.0) for index in range(rounds + 1)
        ]
    last, counted = starts[-1], [start["ready_after_s"] for start in starts[1:]]
    result = {
        **describe(),
        "ready_after_s": {"median": round(statistics.median(counted), 2), "all": counted},
        "first_start_s": starts[0]["ready_after_s"],
        "idle": last["idle"],
        "after_load": last["after_load"],
    }
    write_result(result, json_file)


def _one(command: list[str], cache: str, idle_s: float) -> dict[str, Any]:
    with running(command, {"XDG_CACHE_HOME": cache}) as service:
        start: dict[str, Any] = {"ready_after_s": round(service.ready_after_s, 2)}
        if idle_s:
            start["idle"] = _idle(service.process.pid, idle_s)
            run_load(Load(Target(service.url, drawn_photos()), LOAD_S, clients=32), None)
            start["after_load"] = _memory(service.process.pid)
    return start


def _idle(pid: int, seconds: float) -> dict[str, Any]:
    time.sleep(5)  # let what start-up left behind settle
    processes = process_tree(pid)
    before, started = cpu_seconds(processes), time.perf_counter()
    time.sleep(seconds)
    cores = (cpu_seconds(processes) - before) / (time.perf_counter() - started)
    return {"cores": round(cores, 3), **_memory(pid)}


def _memory(pid: int) -> dict[str, Any]:
    sizes = pss_mb(process_tree(pid))
    by_process = dict(sorted(sizes.items(), key=lambda item: -item[1]))
    return {"pss_mb": round(sum(sizes.values()), 1), "pss_mb_by_process": by_process}


if __name__ == "__main__":
    typer.run(main)
