"""Good requests beside bad ones: ``python tests/load/hostile_load.py --json FILE``.

Good load over HTTP and gRPC, and /readyz, alone and then beside each of the attacks
(hostile_attacks.py). Every good answer is compared with what the same photo got from an idle
service. With ``--keyed`` the service has a key, which the good load sends and the attacks do not;
it is measured alone before and after each of them. Prints JSON.
"""

import asyncio
import secrets
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import psutil
import typer
from good_load import GoodLoad, over_grpc, over_http
from hostile_attacks import attacks_on, keyless_attacks_on, under_attack
from machine import describe, write_result
from running import TANDEM, running

from app.bench.load import drawn_photos, photos_in
from app.launch.checks import free_port
from tests.support.services.processes import replicas

READY_EVERY_S, READY_WITHIN_S = 1.0, 5.0
MEMORY_EVERY_S, BEGUN_S, AFTER_S = 0.05, 2.0, 5.0


def main(
    only: Annotated[str, typer.Option(help="attacks, with commas; else all")] = "",
    seconds: Annotated[float, typer.Option(help="of each phase", min=1)] = 60.0,
    good_rate: Annotated[float, typer.Option(help="good requests/s, Poisson", min=0.1)] = 5.0,
    keyed: Annotated[bool, typer.Option("--keyed", help="attacks without the key")] = False,
    photos: Annotated[Path | None, typer.Option(help="folder of JPEGs; else drawn ones")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the result here")] = None,
) -> None:
    """Run the phases against one service."""
    bodies, grpc_port = (photos_in(photos) if photos else drawn_photos())[:64], free_port()
    key = secrets.token_hex(32) if keyed else ""
    environment = {"TANDEM_API_KEYS": key} if keyed else {}
    with running([TANDEM, "serve", "--grpc-port", str(grpc_port)], environment) as service:
        attacks = attacks_on(service.url, grpc_port, bodies)
        if keyed:
            attacks = keyless_attacks_on(service.url, grpc_port, bodies[0])
        names = only.split(",") if only else list(attacks)
        if unknown := set(names) - set(attacks):
            raise SystemExit(f"--only {','.join(unknown)}: there are {', '.join(attacks)}")
        good = asyncio.run(GoodLoad.learn(partial(over_http, service.url, key), bodies))
        first = replicas(service.process.pid)
        measure = partial(beside, good, service, grpc_port, key, good_rate, seconds)
        phases = {"alone": asyncio.run(measure())}
        for name in names:
            with under_attack(attacks[name]) as ends:
                time.sleep(BEGUN_S)
                phases[name] = asyncio.run(measure())
            phases[name]["hostile"] = ends
            if keyed:
                time.sleep(AFTER_S)
                before, phases["alone"] = phases["alone"], asyncio.run(measure())
                phases[f"alone after {name}"] = phases["alone"]
                phases[name]["p50_ratio"] = {
                    way: ratio(phases[name][way], before[way], phases["alone"][way])
                    for way in ("http", "grpc")
                }
            typer.echo(f"{name}: {phases[name]}", err=True)
        has_died = replicas(service.process.pid) != first
    images = str(photos) if photos else "drawn photos of 500 x 375"
    facts = {"images": images, "good_rate": good_rate, "replica_died": has_died}
    write_result({**describe(), **facts, **phases}, json_file)


def ratio(beside: dict[str, Any], *alone: dict[str, Any]) -> float:
    """Return the median latency beside an attack, over the mean of those alone."""
    return round(beside["p50_ms"] * len(alone) / sum(of["p50_ms"] for of in alone), 2)


async def beside(good, service, grpc_port, key, rate, seconds):
    """Return the figures of good load, and the most memory that the Gateway held (rss, in MB)."""
    by_grpc = good.by(partial(over_grpc, grpc_port, key))
    loads = (good.run(rate, seconds), by_grpc.run(rate, seconds), readiness(service.url, seconds))
    running, most = asyncio.gather(*loads), 0
    gateway = psutil.Process(replicas(service.process.pid)["Gateway"])
    while not running.done():
        most = max(most, gateway.memory_info().rss)
        await asyncio.wait((running,), timeout=MEMORY_EVERY_S)
    figures = dict(zip(("http", "grpc", "readyz"), await running, strict=True))
    return figures | {"gateway_mb_at_most": round(most / 1e6, 1)}


async def readiness(url: str, seconds: float) -> dict[str, Any]:
    """Ask every second; return how many answered 200 in time, and the slowest, in ms."""
    times, num_asked, until = [], 0, time.monotonic() + seconds
    timeout = aiohttp.ClientTimeout(total=READY_WITHIN_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        while time.monotonic() < until:
            num_asked, started = num_asked + 1, time.monotonic()
            with suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(f"{url}/readyz") as answer:
                    if answer.status == 200:
                        times.append((time.monotonic() - started) * 1e3)
            await asyncio.sleep(READY_EVERY_S)
    slowest_ms = round(max(times, default=0.0), 1)
    return {"asked": num_asked, "ready": len(times), "slowest_ms": slowest_ms}


if __name__ == "__main__":
    typer.run(main)
