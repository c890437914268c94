"""How large batches are, apart and in one process: ``python tests/load/mean_batch.py PHOTOS``.

Tandem as shipped, with its members, and with all its stages, as deployments of their own
(configs/separate.yaml) take turns with 16 clients. Every answer tells the sizes of the batches that
its image was in. Prints JSON.
"""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import httpx
import typer
from contestants import all_running, members_apart, tandems
from machine import describe
from result_file import write_result

from app.bench.load import photos_in

WARM_UP_S = 4.0


def main(
    photos: Annotated[Path, typer.Argument(help="folder of JPEGs", exists=True)],
    clients: Annotated[int, typer.Option(min=1)] = 16,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    seconds: Annotated[float, typer.Option(help="of each turn", min=1)] = 6.0,
    out: Annotated[Path | None, typer.Option(help="write the JSON there")] = None,
) -> None:
    """Measure the three in turns."""
    bodies = photos_in(photos)
    with TemporaryDirectory(prefix="to-", dir="/tmp") as folder:
        forms = {"one process": None, "members apart": str(members_apart(Path(folder)))}
        forms["all apart"] = "configs/separate.yaml"
        chosen = [
            one for name, config in forms.items() for one in tandems(name, "imagenette", config, ())
        ]
        turns: dict[str, list[dict[str, Any]]] = {name: [] for name in forms}
        with all_running(chosen) as services:
            for service in services.values():
                asyncio.run(sizes_of(service.url, bodies, clients, WARM_UP_S))
            for _, name in itertools.product(range(rounds), forms):
                row = asyncio.run(sizes_of(services[name].url, bodies, clients, seconds))
                turns[name].append(row)
                typer.echo(f"{name}: {row}", err=True)
    medians = {name: summary(rows) for name, rows in turns.items()}
    facts = {"machine": describe(), "clients": clients, "rounds": rounds, "seconds": seconds}
    write_result({**facts, "median": medians, "turns": turns}, out)


async def sizes_of(
    url: str, bodies: Sequence[bytes], clients: int, seconds: float
) -> dict[str, Any]:
    """Load a service; return images/s, and for each member images and batches by size."""
    images: dict[str, Counter[int]] = {}
    numbers, until, num_answers = itertools.count(), time.monotonic() + seconds, 0

    async def client(http: httpx.AsyncClient) -> None:
        nonlocal num_answers
        while time.monotonic() < until:
            body = bodies[next(numbers) % len(bodies)]
            answer = await http.post(f"{url}/v1/classify", content=body)
            answer.raise_for_status()
            num_answers += 1
            for stage in answer.json()["timings_ms"]["stages"]:
                if stage["stage"] == "infer":
                    images.setdefault(stage["member"], Counter())[stage["batch_size"]] += 1

    async with httpx.AsyncClient(timeout=60) as http:
        await asyncio.gather(*(client(http) for _ in range(clients)))
    return {
        "images_per_s": round(num_answers / seconds, 1),
        "mean_batch": {member: mean_batch(sizes) for member, sizes in images.items()},
        "images_by_size": {m: dict(sorted(sizes.items())) for m, sizes in images.items()},
    }


def mean_batch(images: Counter[int]) -> float:
    """Return the mean size of batches, of how many images were in batches of each size."""
    num_batches = sum(num / size for size, num in images.items())
    return round(images.total() / num_batches, 2)


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of one service's turns."""
    members = rows[0]["mean_batch"]
    return {
        "images_per_s": median(row["images_per_s"] for row in rows),
        "mean_batch": {m: round(median(row["mean_batch"][m] for row in rows), 2) for m in members},
    }


if __name__ == "__main__":
    typer.run(main)
