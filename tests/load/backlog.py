"""What the larger batches of a backlog bring: ``python tests/load/backlog.py PHOTOS``.

Two services, ``backlog_batches`` on and off, take turns: 16 clients, who leave no backlog, and 64,
who do; with the bundled networks at 128 px, and with the same networks at 224 px. Before that a
crowd lets the one that may compile its larger size. They are started several times, since one start
of the same service is up to 5 % faster than another. Prints JSON.
"""

import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import psutil
import typer
import yaml
from larger_set import write_larger_set
from machine import ROOT, describe, process_tree, pss_mb
from result_file import write_result
from running import Running, running_service

from app.bench.client import Target
from app.bench.generator import Load, run_load
from app.bench.photos import photos_in
from app.bench.samples import summarise

CLIENTS = (16, 64)
SIZES_PX = (128, 224)  # the bundled networks' own; that of most networks of ImageNet
COMPILED_S = 6.0
FIGURES = ("images_per_s", "p50_ms", "p99_ms", "cpu_ms")
RESULT = ROOT / "tests" / "load" / "results" / "backlog.json"


def main(
    photos: Annotated[Path, typer.Argument(help="folder of JPEGs", exists=True)],
    starts: Annotated[int, typer.Option(help="of both services", min=1)] = 4,
    rounds: Annotated[int, typer.Option(help="of each start", min=1)] = 2,
    seconds: Annotated[float, typer.Option(help="of each turn", min=1)] = 4.0,
    json_file: Annotated[Path, typer.Option("--json", help="write the result here")] = RESULT,
) -> None:
    """Measure with and without larger batches, in turns."""
    bodies = photos_in(photos)
    result: dict[str, Any] = {"machine": describe(), "starts": starts}
    result |= {"rounds": rounds, "seconds": seconds}
    with tempfile.TemporaryDirectory() as folder:
        sets = {128: "imagenette", 224: str(write_larger_set(Path(folder) / "set224", 224))}
        for size in SIZES_PX:
            result[f"{size}_px"] = compared(
                bodies, sets[size], Path(folder), starts, rounds, seconds
            )
    write_result(result, json_file)


def compared(
    bodies: list[bytes], model_set: str, folder: Path, starts: int, rounds: int, seconds: float
) -> dict[str, Any]:
    """Return the medians of both services by the number of clients, and how they compare."""
    rows: dict[tuple[int, str], list[dict[str, float]]] = {}
    memory: dict[str, list[float]] = {"on": [], "off": []}
    for start in range(starts):
        with ExitStack() as stack:
            services = {
                name: stack.enter_context(
                    running_service(
                        "--config", config(folder, name == "on"), "--model-set", model_set
                    )
                )
                for name in memory
            }
            for service in services.values():
                turn(service, bodies, max(CLIENTS), COMPILED_S)
            for number in range(rounds):
                for clients in CLIENTS:
                    for name in sorted(services, reverse=bool(number % 2)):  # who is first varies
                        row = turn(services[name], bodies, clients, seconds)
                        rows.setdefault((clients, name), []).append(row)
                        typer.echo(f"start {start + 1}: {clients} {name} {row}", err=True)
            for name, service in services.items():
                memory[name].append(pss(service))
    medians = {
        key: {f: round(median(row[f] for row in of), 2) for f in FIGURES}
        for key, of in rows.items()
    }
    of_clients = {
        str(clients): {
            "on": (on := medians[clients, "on"]),
            "off": (off := medians[clients, "off"]),
            "share": round(on["images_per_s"] / off["images_per_s"], 3),
        }
        for clients in CLIENTS
    }
    return {
        "clients": of_clients,
        "pss_mb": {name: round(median(of)) for name, of in memory.items()},
    }


def config(folder: Path, is_on: bool) -> str:
    """Write serve_config.yaml with the setting; return its path."""
    shipped = yaml.safe_load((ROOT / "serve_config.yaml").read_text("utf-8"))
    shipped["applications"][0]["args"]["backlog_batches"] = is_on
    path = folder / f"{is_on}.yaml"
    path.write_text(yaml.safe_dump(shipped), "utf-8")
    return str(path)


def turn(service: Running, bodies: list[bytes], clients: int, seconds: float) -> dict[str, float]:
    """Load one of them, while the other rests."""
    load = Load(Target(service.url, bodies), seconds, clients=clients)
    told = summarise(run_load(load, psutil.Process(service.process.pid)), 1e4)
    assert told.service_cpu_ms is not None
    return {
        "images_per_s": told.images_per_s,
        "p50_ms": told.p50_ms,
        "p99_ms": told.p99_ms,
        "cpu_ms": told.service_cpu_ms,
    }


def pss(service: Running) -> float:
    """Return MB of all its processes."""
    return round(sum(pss_mb(process_tree(service.process.pid)).values()), 1)


if __name__ == "__main__":
    typer.run(main)
