"""Combiner in the Gateway's process or as a deployment: ``python tests/load/placement.py IMAGES``.

Both services run at once but are loaded in turns, round by round, so that a noisy machine hits both
alike. Prints JSON: requests/s at 16 clients, median latency of one client, CPU-ms per request.
"""

import asyncio
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import aiohttp
import typer
import yaml
from machine import ROOT, cpu_seconds, describe, process_tree
from running import Running, running_service

VARIANTS = ("deployment", "gateway")


def main(
    images: Annotated[Path, typer.Argument(help="folder of JPEGs", exists=True)],
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    requests: Annotated[int, typer.Option(help="per round and variant", min=16)] = 600,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the result here")] = None,
) -> None:
    """Measure both placements in turns."""
    bodies = [path.read_bytes() for path in sorted(images.rglob("*.JPEG"))[:100]]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        services = {
            variant: stack.enter_context(running_service("--config", _config(folder, variant)))
            for variant in VARIANTS
        }
        rows: dict[str, list[dict[str, float]]] = {variant: [] for variant in VARIANTS}
        for index in range(rounds + 1):
            for variant, service in services.items():
                row = _load(service, bodies, requests if index else 100)
                if index:  # the first round warms up
                    rows[variant].append(row)
    result = {**describe(), "rounds": rows, "median": {v: _median(r) for v, r in rows.items()}}
    text = json.dumps(result, indent=2)
    typer.echo(text)
    if json_file:
        json_file.write_text(text + "\n", "utf-8")


def _config(folder: Path, variant: str) -> str:
    content = yaml.safe_load((ROOT / "serve_config.yaml").read_text("utf-8"))
    application = content["applications"][0]
    application["args"]["combiner"] = variant
    options = {"max_ongoing_requests": 256, "ray_actor_options": {"num_cpus": 0.1}}
    application["deployments"] = [d for d in application["deployments"] if d["name"] != "Combiner"]
    if variant == "deployment":
        application["deployments"].append({"name": "Combiner", **options})
    path = folder / f"{variant}.yaml"
    path.write_text(yaml.safe_dump(content), "utf-8")
    return str(path)


def _load(service: Running, bodies: list[bytes], requests: int) -> dict[str, float]:
    before = cpu_seconds(process_tree(service.process.pid))
    throughput, _ = asyncio.run(_closed_loop(service.url, bodies, requests, 16))
    cpu_ms = (cpu_seconds(process_tree(service.process.pid)) - before) / requests * 1e3
    _, latency_ms = asyncio.run(_closed_loop(service.url, bodies, requests // 6, 1))
    return {
        "requests_per_s": round(throughput, 1),
        "cpu_ms_per_request": round(cpu_ms, 2),
        "latency_ms_one_client": round(latency_ms, 2),
    }


async def _closed_loop(
    url: str, bodies: list[bytes], requests: int, clients: int
) -> tuple[float, float]:
    """Return requests/s and the median latency in ms."""
    work: Iterator[bytes] = (body for _, body in zip(range(requests), cycle(bodies), strict=False))
    latencies: list[float] = []

    async def client(session: aiohttp.ClientSession) -> None:
        for body in work:
            started = time.perf_counter()
            async with session.post(f"{url}/v1/classify", data=body) as answer:
                await answer.read()
                answer.raise_for_status()
            latencies.append(time.perf_counter() - started)

    started = time.perf_counter()
    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(client(session) for _ in range(clients)))
    return requests / (time.perf_counter() - started), statistics.median(latencies) * 1e3


def _median(rows: list[dict[str, Any]]) -> dict[str, float]:
    return {key: round(statistics.median(row[key] for row in rows), 2) for key in rows[0]}


if __name__ == "__main__":
    typer.run(main)
