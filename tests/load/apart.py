"""What it costs that stages are processes of their own: ``python tests/load/apart.py PHOTOS``.

Services take turns, round by round, on the same photos: the graph in one process
(serve_config.yaml), the graph apart (configs/separate.yaml), and what ``--other`` names besides,
for instance the same configuration of another checkout. Closed loops of 16 clients and of one. The
clients are on the same machine; the CPU time is that of the service's processes alone. Prints JSON.
"""

import asyncio
import itertools
import json
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import aiohttp
import psutil
import typer
from machine import ROOT, describe
from running import TANDEM, Running, running

from app.bench.photos import photos_in
from app.bench.process_tree import cpu_seconds

CLIENTS = (16, 1)
PARSED_EVERY = 4  # answers whose timings are read: the client's CPU time is the service's loss


def main(
    photos: Annotated[Path, typer.Argument(help="folder of JPEGs", exists=True)],
    other: Annotated[list[str], typer.Option(help="NAME=TANDEM:CONFIG")] = [],  # noqa: B006
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    seconds: Annotated[float, typer.Option(help="of each turn", min=1)] = 8.0,
    out: Annotated[Path | None, typer.Option(help="write the JSON there")] = None,
) -> None:
    """Measure all in turns."""
    bodies = photos_in(photos)
    commands = {
        "one process": (TANDEM, str(ROOT / "serve_config.yaml")),
        "apart": (TANDEM, str(ROOT / "configs" / "separate.yaml")),
    }
    for told in other:
        name, _, rest = told.partition("=")
        commands[name] = (*rest.split(":"),)  # type: ignore[assignment]
    with ExitStack() as stack:
        services = {
            name: stack.enter_context(
                running([tandem, "serve", "--config", config], folder=checkout_of(tandem))
            )
            for name, (tandem, config) in commands.items()
        }
        for service in services.values():
            asyncio.run(load(service.url, bodies, 16, 4.0))
        rows = [
            {
                f"{name}, {clients}": turn(service, bodies, clients, seconds)
                for clients in CLIENTS
                for name, service in services.items()
            }
            for _ in range(rounds)
        ]
    result = {"machine": describe(), "median": medians(rows), "rounds": rows}
    text = json.dumps(result, indent=2)
    typer.echo(text)
    if out is not None:
        out.write_text(text + "\n", "utf-8")


def checkout_of(tandem: str) -> Path:
    """Return the folder whose .venv/bin has the command."""
    return Path(tandem).absolute().parents[2]


def turn(service: Running, bodies: list[bytes], clients: int, seconds: float) -> dict[str, Any]:
    """Return one turn's figures."""
    root = psutil.Process(service.process.pid)
    before = cpu_seconds(root)
    row = asyncio.run(load(service.url, bodies, clients, seconds))
    after = cpu_seconds(root)
    num_images = row.pop("num_images")
    by_stage = {
        stage: round((after[stage] - before.get(stage, 0.0)) * 1e3 / num_images, 2)
        for stage in sorted(after)
    }
    return {**row, "cpu_ms_per_image": round(sum(by_stage.values()), 2), **by_stage}


async def load(url: str, bodies: list[bytes], clients: int, seconds: float) -> dict[str, Any]:
    """Run closed loops; return rate, latency and the mean batch of each member."""
    photos, times_ms = itertools.cycle(bodies), []
    batches: dict[str, list[int]] = {}
    num_failed = 0
    started = time.perf_counter()

    async def client(session: aiohttp.ClientSession) -> None:
        nonlocal num_failed
        while (begun := time.perf_counter()) < started + seconds:
            async with session.post(f"{url}/v1/classify?top_k=1", data=next(photos)) as answer:
                text = await answer.read()
            times_ms.append((time.perf_counter() - begun) * 1e3)
            num_failed += answer.status != 200
            if len(times_ms) % PARSED_EVERY == 0 and answer.status == 200:
                for stage in json.loads(text)["timings_ms"]["stages"]:
                    if stage["stage"] == "infer":
                        batches.setdefault(stage["member"], []).append(stage["batch_size"])

    connector = aiohttp.TCPConnector(limit=clients)
    async with aiohttp.ClientSession(connector=connector) as session:
        await asyncio.gather(*(client(session) for _ in range(clients)))
    in_order = sorted(times_ms)
    return {
        "num_images": len(times_ms),
        "images_per_s": round(len(times_ms) / (time.perf_counter() - started), 1),
        "p50_ms": round(median(in_order), 2),
        "p99_ms": round(in_order[int(len(in_order) * 0.99)], 2),
        "num_failed": num_failed,
        # Of batches, not of images: an image of a batch of n is one n-th of a batch.
        **{
            f"mean batch {name}": round(len(sizes) / sum(1 / size for size in sizes), 2)
            for name, sizes in sorted(batches.items())
        },
    }


def medians(rows: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Return the median of the rounds, figure by figure."""
    return {
        name: {figure: round(median(row[name][figure] for row in rows), 2) for figure in found}
        for name, found in rows[0].items()
    }


if __name__ == "__main__":
    typer.run(main)
