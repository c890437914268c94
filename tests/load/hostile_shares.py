"""Good requests beside clients that would take the service from all others.

``python tests/load/hostile_shares.py --json FILE``: good photos alone; then beside each of

- ``unread``: 140 connections that send a byte now and then to routes that read no body, and that
  come back when they are cut; ``begun``: the same to POST /v1/classify, with a wrong parameter;
- ``header``: five bad gRPC calls a second that say that HAProxy had refused 999 requests.

Every good answer is compared with what the same photo got from an idle service. Prints JSON.
"""

import asyncio
import itertools
import time
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import grpc
import typer
from apart import apart
from good_load import GoodLoad, over_http
from hostile_crowds import Attack, attacked
from machine import describe, write_result
from running import running_service

from app.bench.load import drawn_photos, photos_in
from app.errors import REFUSED_HEADER
from app.grpc.tandem_pb2 import ClassifyRequest
from app.grpc.tandem_pb2_grpc import EnsembleStub
from app.launch.checks import free_port

NUM_SLOW = 140
EVERY_S = 1.0
UNREAD = ("/nothing", "/healthz", "/v1/models", "/v2/models/nothing/infer")
BEGUN = ("/v1/classify?top_k=none",)
FALSE_METADATA = ((REFUSED_HEADER, "999"),)


def main(
    seconds: Annotated[float, typer.Option(help="of each phase", min=5)] = 20.0,
    good_rate: Annotated[float, typer.Option(help="good requests/s, Poisson", min=0.1)] = 10.0,
    photos: Annotated[Path | None, typer.Option(help="folder of JPEGs; else drawn ones")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the result here")] = None,
) -> None:
    """Run the phases against one service."""
    bodies, grpc_port = (photos_in(photos) if photos else drawn_photos())[:64], free_port()
    with running_service("--grpc-port", str(grpc_port)) as service:
        good = asyncio.run(GoodLoad.learn(partial(over_http, service.url), bodies))
        attacks: dict[str, Attack] = {
            "unread": partial(slow_bodies, service.url, UNREAD),
            "begun": partial(slow_bodies, service.url, BEGUN),
            "header": partial(false_headers, grpc_port),
        }
        phases: dict[str, Any] = {"alone": asyncio.run(good.run(good_rate, seconds))}
        for name, attack in attacks.items():
            phases[name] = _beside(good, attack, good_rate, seconds)
    images = str(photos) if photos else "drawn photos of 500 x 375"
    write_result({**describe(), "images": images, "good_rate": good_rate, **phases}, json_file)


def _beside(good: GoodLoad, attack: Attack, rate: float, seconds: float) -> dict[str, Any]:
    with apart(partial(attacked, attack)) as ends:
        time.sleep(2)  # all of them have begun
        figures = asyncio.run(good.run(rate, seconds))
    success = round(figures.get("right", 0) / figures["sent"], 4)
    return {**figures, "success": success, "hostile": dict(Counter(ends).most_common())}


async def slow_bodies(url: str, paths: tuple[str, ...], ends: Counter[str]) -> None:
    """Begin requests whose bodies come byte by byte, and again when they are cut."""
    where = urlsplit(url)
    async with asyncio.TaskGroup() as group:
        for path in itertools.islice(itertools.cycle(paths), NUM_SLOW):
            group.create_task(_slow_body(str(where.hostname), where.port or 80, path, ends))


async def _slow_body(host: str, port: int, path: str, ends: Counter[str]) -> None:
    while True:
        begun, told = time.monotonic(), b""
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\n".encode())
            writer.write(b"Content-Length: 1000000\r\n\r\n" + bytes(20_000))
            while not reader.at_eof():
                with suppress(TimeoutError):
                    told += await asyncio.wait_for(reader.read(65536), EVERY_S)
                writer.write(b"a")
        except ConnectionError:
            pass
        finally:
            writer.close()
        status = told[9:12].decode("latin-1") or "nothing"
        ends[f"{status} after {time.monotonic() - begun:.0f} s"] += 1


async def false_headers(port: int, ends: Counter[str]) -> None:
    """Call five times a second, without an image."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        ensemble = EnsembleStub(channel)
        while True:
            try:
                await ensemble.Classify(ClassifyRequest(), metadata=FALSE_METADATA, timeout=20)
            except grpc.aio.AioRpcError as error:
                ends[error.code().name] += 1
            await asyncio.sleep(0.2)


if __name__ == "__main__":
    typer.run(main)
