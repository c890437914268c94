"""Good requests beside bad ones: ``python tests/load/hostile_load.py --json FILE``.

Good load alone; then beside the hostile corpus (tests/support/services/hostile.py) at 50
requests/s; then beside idle connections and slow clients, which come back as soon as they are cut;
then good calls of gRPC beside large and slow ones (hostile_calls.py); then both beside stalled
calls, and beside a crowd on one member (hostile_crowds.py). 0 s leave a phase out.
Every good answer is compared with what the same photo got from an idle service. Prints JSON.
"""

import asyncio
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from good_load import GoodLoad, over_http
from hostile_calls import beside_calls
from hostile_crowds import beside_crowds
from hostile_flood import flooding
from machine import describe, write_result
from running import Running, running_service

from app.bench.load import drawn_photos, photos_in
from app.launch.checks import free_port
from tests.support.services.processes import replicas
from tests.support.slow_clients import KINDS, linger

GIVE_UP_S = 60.0  # a slow client that is not cut by then


def main(
    seconds: Annotated[float, typer.Option(help="of the hostile corpus", min=0)] = 300.0,
    slow_seconds: Annotated[float, typer.Option(help="of the slow clients", min=0)] = 60.0,
    grpc_seconds: Annotated[float, typer.Option(help="of the hostile calls", min=0)] = 60.0,
    crowd_seconds: Annotated[float, typer.Option(help="of stalls and crowds", min=0)] = 60.0,
    alone_seconds: Annotated[float, typer.Option(help="of good load alone", min=5)] = 30.0,
    good_rate: Annotated[float, typer.Option(help="good requests/s, Poisson", min=0.1)] = 5.0,
    hostile_rate: Annotated[float, typer.Option(help="bad requests/s", min=1)] = 50.0,
    num_idle: Annotated[int, typer.Option(help="idle connections", min=0)] = 1000,
    num_slow: Annotated[int, typer.Option(help="slow clients of each kind", min=0)] = 50,
    photos: Annotated[Path | None, typer.Option(help="folder of JPEGs; else drawn ones")] = None,
    num_calling: Annotated[int, typer.Option(help="gRPC clients of each kind", min=1)] = 10,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the result here")] = None,
) -> None:
    """Run the phases against one service."""
    bodies = (photos_in(photos) if photos else drawn_photos())[:64]
    grpc_port = free_port()
    with running_service("--grpc-port", str(grpc_port)) as service:
        good = asyncio.run(GoodLoad.learn(partial(over_http, service.url), bodies))
        with flooding(service.url, hostile_rate):  # what grows only once has grown
            asyncio.run(good.run(good_rate, min(20.0, seconds)))
        first = replicas(service.process.pid)
        memory = {"before": _memory_mb(service)}
        alone = asyncio.run(good.run(good_rate, alone_seconds))
        with flooding(service.url, hostile_rate) as flood:
            beside = asyncio.run(good.run(good_rate, seconds))
        memory["after_hostile"] = _memory_mb(service)
        slow = asyncio.run(_slow(service, good, good_rate, slow_seconds, num_idle, num_slow))
        memory["after_slow"] = _memory_mb(service)
        calls = beside_calls(
            good, grpc_port, _gateway(service), good_rate, grpc_seconds, num_calling
        )
        memory["after_grpc"] = _memory_mb(service)
        crowds = beside_crowds(good, service.url, grpc_port, bodies, good_rate, crowd_seconds)
        memory["after_crowds"] = _memory_mb(service)
        has_died = replicas(service.process.pid) != first
    result = {
        **describe(),
        "images": str(photos) if photos else "drawn photos of 500 x 375",
        "good_rate": good_rate,
        "num_idle": num_idle,
        "num_slow_of_each_kind": num_slow,
        "good_alone": alone,
        "good_beside_hostile": beside,
        "hostile": flood,
        **slow,
        "grpc": calls,
        "crowds": crowds,
        "gateway_memory_mb": memory,
        "replica_died": has_died,
    }
    write_result(result, json_file)


def _memory_mb(service: Running) -> float:
    """Return what the Gateway's process holds, after a moment to settle."""
    time.sleep(2)
    return round(_gateway(service).memory_full_info().pss / 1e6, 1)


def _gateway(service: Running) -> psutil.Process:
    return psutil.Process(replicas(service.process.pid)["Gateway"])


async def _slow(
    service: Running, good: GoodLoad, rate: float, seconds: float, num_idle: int, num_slow: int
) -> dict[str, Any]:
    """Run good load beside connections that do nothing; tell how long each kind was let."""
    address, until = service.url.removeprefix("http://").split(":"), time.monotonic() + seconds
    cuts: dict[str, list[tuple[float, int]]] = {kind: [] for kind in KINDS}

    async def attack(kind: str) -> None:
        while time.monotonic() < until:
            cut = await linger(address[0], int(address[1]), kind, GIVE_UP_S)
            cuts[kind].append((cut.after_s, cut.status))

    attackers = [
        asyncio.create_task(attack(kind))
        for kind in KINDS
        for _ in range(num_idle if kind == "idle" else num_slow)
    ]
    figures = await good.run(rate, seconds)
    await asyncio.gather(*attackers)
    return {
        "good_beside_slow": figures,
        "slow": {kind: _told(found) for kind, found in cuts.items() if found},
    }


def _told(cuts: list[tuple[float, int]]) -> dict[str, Any]:
    after = sorted(seconds for seconds, _ in cuts)
    statuses = {str(s): sum(status == s for _, status in cuts) for s in {s for _, s in cuts}}
    return {
        "connections": len(cuts),
        "cut_after_s": {"least": round(after[0], 1), "most": round(after[-1], 1)},
        "by_status": statuses,
    }


if __name__ == "__main__":
    typer.run(main)
