"""The batch queue against ``@serve.batch``, in the same replica: ``python tests/load/batching.py``.

One deployment has both in front of the same compiled network and loads itself: closed loops of
clients that hand in one image at a time. No transport is in it. Both take turns, round by round.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import ray
import typer
from machine import describe
from ray import serve

from app.compute.inference_threads import InferenceThreads
from app.queueing.batch_queue import BatchQueue
from models.model_set import load_model_set
from models.runtime import CompiledNetwork, RuntimeOptions
from tests.support.queued_images import submit

WAITS_S = (0.0, 0.002, 0.01)  # batch_wait_timeout_s of @serve.batch, whose default is 0.01
SIZES = (1, 2, 4, 8)


class Replica:
    """Holds one network, one thread for it, and every way to form its batches."""

    def __init__(self, member: str) -> None:
        path = load_model_set("imagenette").network_path(member, "INT8")
        self.network = CompiledNetwork(path, RuntimeOptions(num_threads=1, batch_sizes=SIZES))
        self.network.warm_up()
        self.threads = InferenceThreads(1)
        self.queue = BatchQueue(self.infer, SIZES, 512, scheduler=self.threads.scheduler)
        self.image = np.zeros(self.network.input_shape, np.uint8)
        self.batches: list[int] = []

    async def infer(self, batch: Sequence[np.ndarray]) -> np.ndarray:
        self.batches.append(len(batch))
        return await self.threads.run(self.network.infer, batch)

    @serve.batch(max_batch_size=8, batch_wait_timeout_s=WAITS_S[0])
    async def at_once(self, images: list[np.ndarray]) -> list[np.ndarray]:
        return list(await self.infer(images))

    @serve.batch(max_batch_size=8, batch_wait_timeout_s=WAITS_S[1])
    async def short_wait(self, images: list[np.ndarray]) -> list[np.ndarray]:
        return list(await self.infer(images))

    @serve.batch(max_batch_size=8, batch_wait_timeout_s=WAITS_S[2])
    async def default_wait(self, images: list[np.ndarray]) -> list[np.ndarray]:
        return list(await self.infer(images))

    async def ours(self, image: np.ndarray) -> np.ndarray:
        (future,) = submit(self.queue, [image])
        return (await future).probabilities

    async def load(self, way: str, clients: int, seconds: float) -> dict[str, float]:
        """Run closed loops of ``clients`` on one of the ways; each client rests 1 ms between."""
        self.batches.clear()
        latencies: list[float] = []
        ends = time.perf_counter() + seconds

        async def client(rest_s: float) -> None:
            while (now := time.perf_counter()) < ends:
                await getattr(self, way)(self.image)
                latencies.append(time.perf_counter() - now)
                await asyncio.sleep(rest_s)

        rests = cycle([0.0005, 0.001, 0.002])  # nobody's clients arrive in step
        await asyncio.gather(*(client(next(rests)) for _ in range(clients)))
        return {
            "images_per_s": round(len(latencies) / seconds, 1),
            "p50_ms": round(median(latencies) * 1e3, 2),
            "mean_batch": round(float(np.mean(self.batches)), 2),
        }


def main(
    member: Annotated[str, typer.Option()] = "densenet169",
    clients: Annotated[list[int], typer.Option()] = [1, 4, 16],  # noqa: B006
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    seconds: Annotated[float, typer.Option(help="of each turn", min=0.5)] = 3.0,
    out: Annotated[Path | None, typer.Option(help="write the JSON there")] = None,
) -> None:
    """Measure all ways in turns."""
    ray.init(address="local", include_dashboard=False, log_to_driver=False)
    deployment: Any = serve.deployment(max_ongoing_requests=64)(Replica)
    handle = serve.run(deployment.bind(member), route_prefix=None)
    ways = ("ours", "at_once", "short_wait", "default_wait")
    found: dict[int, dict[str, list[dict[str, float]]]] = {
        c: {w: [] for w in ways} for c in clients
    }
    for number in range(rounds + 1):
        for count in clients:
            for way in ways:
                row = handle.load.remote(way, count, seconds).result()
                if number:  # the first round warms up
                    found[count][way].append(row)
    serve.shutdown()
    medians = {
        f"{count} clients": {
            way: {key: median(row[key] for row in rows) for key in rows[0]}
            for way, rows in of_way.items()
        }
        for count, of_way in found.items()
    }
    waits = dict(zip(ways[1:], WAITS_S, strict=True))
    result = {"machine": describe(), "member": member, "batch_wait_timeout_s": waits}
    text = json.dumps(result | {"median": medians, "rounds": found}, indent=2)
    typer.echo(text)
    if out is not None:
        out.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    typer.run(main)
