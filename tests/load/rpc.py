"""gRPC beside HTTP: ``python tests/load/rpc.py PHOTOS``.

One service answers both; closed loops of 1 and of 16 clients send it single photos, by one protocol
and by the other in turns. Both clients are asyncio in this process, which is on the same machine:
their cost is in the figures too. Prints JSON.
"""

import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import aiohttp
import grpc
import typer
from machine import describe
from running import running_service

from app.bench.load import photos_in
from app.grpc.tandem_pb2 import ClassifyRequest
from app.grpc.tandem_pb2_grpc import EnsembleStub
from app.launch.ports import free_port

Send = Callable[[bytes], Awaitable[str]]  # a photo's label
CLIENTS = (1, 16)


def main(
    photos: Annotated[Path, typer.Argument(help="folder of JPEGs", exists=True)],
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    seconds: Annotated[float, typer.Option(help="of each turn", min=1)] = 6.0,
    out: Annotated[Path | None, typer.Option(help="write the JSON there")] = None,
) -> None:
    """Measure all in turns."""
    port = free_port()
    with running_service("--grpc-port", str(port)) as service:
        rows = asyncio.run(measure(service.url, port, photos_in(photos), rounds, seconds))
    result = {"machine": describe(), "medians": medians(rows), "rounds": rows}
    text = json.dumps(result, indent=2)
    typer.echo(text)
    if out is not None:
        out.write_text(text + "\n", "utf-8")


async def measure(
    url: str, port: int, bodies: list[bytes], rounds: int, seconds: float
) -> list[dict[str, dict[str, float]]]:
    """Return each round's figures by protocol and number of clients."""
    rows = []
    async with over_http(url) as http, over_grpc(port) as rpc:
        ways = {"http": http, "grpc": rpc}
        for body in bodies[:8]:  # also a check: both say the same
            labels = {await send(body) for send in ways.values()}
            if len(labels) != 1:
                raise SystemExit(f"the protocols do not agree: {labels}")
        for number in range(rounds):
            turns = list(itertools.product(CLIENTS, sorted(ways, reverse=bool(number % 2))))
            rows.append(
                {f"{way} {n}": await load(ways[way], bodies, n, seconds) for n, way in turns}
            )
            typer.echo(f"round {number + 1} of {rounds}: {rows[-1]}", err=True)
    return rows


async def load(send: Send, bodies: list[bytes], clients: int, seconds: float) -> dict[str, float]:
    """Run closed loops; return images/s and the median latency in ms."""
    photos, times = itertools.cycle(bodies), []
    started = time.perf_counter()

    async def client() -> None:
        while (begun := time.perf_counter()) < started + seconds:
            await send(next(photos))
            times.append((time.perf_counter() - begun) * 1e3)

    await asyncio.gather(*(client() for _ in range(clients)))
    rate = len(times) / (time.perf_counter() - started)
    return {"images_per_s": round(rate, 2), "median_ms": round(median(times), 2)}


def medians(rows: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Return the median of the rounds, figure by figure."""
    return {
        name: {figure: median(row[name][figure] for row in rows) for figure in rows[0][name]}
        for name in rows[0]
    }


@asynccontextmanager
async def over_http(url: str) -> Any:
    """Yield a function that sends a photo as a body."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def send(body: bytes) -> str:
            async with session.post(f"{url}/v1/classify", data=body) as answer:
                answer.raise_for_status()
                told = await answer.json()
                return str(told["predictions"][0]["label"])

        yield send


@asynccontextmanager
async def over_grpc(port: int) -> Any:
    """Yield a function that sends a photo as a message."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        ensemble = EnsembleStub(channel)

        async def send(body: bytes) -> str:
            reply = await ensemble.Classify(ClassifyRequest(images=[body]))
            return str(reply.results[0].classified.predictions[0].label)

        yield send


if __name__ == "__main__":
    typer.run(main)
